"""Products with quantized weights, beside those of other libraries.

    python benchmarks/peers.py
    python benchmarks/peers.py --peers eqquant bitsandbytes --m 1 8 --markdown
    python benchmarks/peers.py --peers eqquant llama.cpp --m 1 --ring 0.5

Each peer is installed into an environment of its own, in a folder that is kept
(`--cache`), which takes some 12 GB and the first time minutes; what cannot be installed
is named. Everyone gets the same normal weights and activations, and is measured in a
process of its own, in turn with its own dense float32 product: an entry is how many
times as fast as that it is (medians; in parentheses its slowest and its fastest run,
over the median of the dense product). Copying results to NumPy counts, for both. A
second table has microseconds (medians), as a library's own dense product may be slow.

A call finds the caches as the dense product left them: without a weight, and without
the code that makes a call. With `--ring` a run is instead one product with each of many
weights, one after the other as in a model, that together no cache holds.

`EQQUANT_CPU` with less than `amx` also leaves out the kernels for AMX of llama.cpp.

SQNR is that of the product, against the float64 product with the weights before they
were quantized; MB is by how much one product of 64 rows raises memory; GB/s how fast
float32 weights are quantized (and packed, and compiled where that happens then).
"""

import argparse
import json
import pathlib
import subprocess
import sys

import _peers
from _environments import CACHE, install, last_line, run


HERE = pathlib.Path(__file__).resolve().parent


def measure(
    peer: _peers.Peer, asked: dict, cache: pathlib.Path, timeout: float
) -> list[dict]:
    python = sys.executable
    if peer.packages:
        python = install(peer.name, peer.packages, cache, peer.header)
    ran = run(
        python,
        str(HERE / "_measure_peer.py"),
        peer.name,
        json.dumps(asked),
        environment=peer.environment,
        capture_output=True,
        timeout=timeout,
    )
    if ran.returncode:
        raise RuntimeError(f"fails: {last_line(ran.stderr)}")
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def cells(name: str, result: dict, ms: list[int]) -> list[str]:
    def ratio(m):
        median, least, most = result["ratios"][str(m)]
        return f"{median:.2f} ({least:.2f}-{most:.2f})"

    memory = result["peak_mb"]
    return [
        f"{name}: {result['variant']}",
        *map(ratio, ms),
        f"{result['bytes_per_weight']:.3f}",
        f"{result['sqnr']:.1f}",
        f"{result['quantized_gb_per_s']:.2f}",
        "-" if memory is None else f"{memory:.0f}",
    ]


def times(name: str, result: dict, ms: list[int]) -> list[str]:
    variant, of = (
        ("dense float32", result["dense"])
        if "dense" in result
        else (result["variant"], result["microseconds"])
    )
    return [f"{name}: {variant}", *(f"{of[str(m)]:.0f}" for m in ms)]


def print_table(rows: list[list[str]], markdown: bool) -> None:
    if markdown:
        rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
        print("\n".join("| " + " | ".join(row) + " |" for row in rows))
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(c.ljust(n) for c, n in zip(row, widths, strict=True)).rstrip())


def main() -> None:
    peers = _peers.find()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="+", default=list(peers), choices=peers)
    parser.add_argument("--m", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument(
        "--shapes", nargs="+", default=["4096x4096", "11008x4096"], help="ROWSxCOLUMNS"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="for each entry")
    parser.add_argument("--ring", type=float, default=0, help="gigabytes of weights")
    parser.add_argument("--timeout", type=float, default=1800, help="for each peer")
    parser.add_argument("--cache", type=pathlib.Path, default=CACHE)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()

    shapes = [list(map(int, shape.split("x"))) for shape in options.shapes]
    asked = {"shapes": shapes} | {
        k: getattr(options, k) for k in ("m", "seconds", "ring")
    }
    found, dense, missing, versions = [], [], [], {}
    for name in options.peers:
        try:
            results = measure(peers[name], asked, options.cache, options.timeout)
        except (RuntimeError, subprocess.TimeoutExpired) as problem:
            missing.append(f"{name}: {problem}")
            continue
        print(f"measured {name}", file=sys.stderr, flush=True)
        for result in results:
            if "failed" in result:
                missing.append(f"{name}, {result['variant']}: {result['failed']}")
            elif "dense" in result:
                dense.append((name, result))
            else:
                found.append((name, result))
                versions[name] = result["version"]
    head = ["", *(f"M={m}" for m in options.m), "B/weight", "SQNR dB", "GB/s", "MB"]
    for shape in shapes:
        print(f"\nweights of {shape[0]} x {shape[1]}, times as fast as dense float32\n")
        of_shape = [cells(n, r, options.m) for n, r in found if r["shape"] == shape]
        print_table([head, *of_shape], options.markdown)
        print("\nmicroseconds\n")
        all_times = [
            times(n, r, options.m) for n, r in dense + found if r["shape"] == shape
        ]
        print_table([head[: 1 + len(options.m)], *all_times], options.markdown)
    print()
    for name, version in versions.items():
        print(f"{name}: {version}")
    for line in missing:
        print(f"NOT MEASURED: {line}")


if __name__ == "__main__":
    main()
