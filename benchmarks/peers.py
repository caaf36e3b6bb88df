"""Compare quantized matmuls on CPUs with other libraries.

    python benchmarks/peers.py
    python benchmarks/peers.py --peers eqquant bitsandbytes --m 1 8 --markdown
    python benchmarks/peers.py --peers eqquant llama.cpp --m 1 --ring 0.5 --program

The script installs each library into a separate environment, which is kept (`--cache`).
The environments take about 12 GB, and the first run takes minutes. Libraries that
cannot be installed are listed. Every library gets the same normally distributed weights
and activations, and runs in a separate process, in alternation with its own dense
float32 matmul. Copying results to NumPy counts for both.

The first table contains the speed relative to that dense matmul: the median, and in
parentheses the slowest and the fastest run over the median dense run. The second table
contains median times in microseconds, because a library's dense matmul can be slow.

- "SQNR dB": signal to quantization noise of the matmul, relative to the float64 matmul
  with the original weights.
- "GB/s": the rate at which float32 weights are quantized, including packing and any
  compilation.
- "MB": the growth of memory during one matmul of 64 rows.

By default, each call finds the caches as the dense matmul left them, so neither the
weight nor the dispatch code is cached. With `--ring`, a run multiplies with each of
several weights in turn; together, they exceed every cache. With `--program` as well,
each program multiplies with 128 of them, as in a model, for llama.cpp and JAX only. Its
times are for one matmul.

If `EQQUANT_CPU` excludes AMX, llama.cpp does not use AMX either.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import _peers
from _environments import CACHE, install, last_line, run
from _tables import add_output_options, output, print_table


HERE = pathlib.Path(__file__).resolve().parent


def measure(
    peer: _peers.Peer, request: dict, cache: pathlib.Path, timeout: float
) -> list[dict]:
    python = sys.executable
    if peer.packages:
        python = install(peer.name, peer.packages, cache, peer.header)
    ran = run(
        python,
        str(HERE / "_measure_peer.py"),
        peer.name,
        json.dumps(request),
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
        median, slowest, fastest = result["ratios"][str(m)]
        return f"{median:.2f} ({slowest:.2f}-{fastest:.2f})"

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
    variant, microseconds = (
        ("dense float32", result["dense"])
        if "dense" in result
        else (result["variant"], result["microseconds"])
    )
    return [f"{name}: {variant}", *(f"{microseconds[str(m)]:.0f}" for m in ms)]


def main() -> None:
    peers = _peers.find()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="+", default=list(peers), choices=peers)
    parser.add_argument(
        "--m", type=int, nargs="+", default=[1, 8, 64, 512], help="rows of x"
    )
    parser.add_argument(
        "--shapes", nargs="+", default=["4096x4096", "11008x4096"], help="ROWSxCOLUMNS"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="for each entry")
    parser.add_argument("--ring", type=float, default=0, help="gigabytes of weights")
    parser.add_argument("--program", action="store_true", help="join each ring")
    parser.add_argument("--timeout", type=float, default=1800, help="for each peer")
    parser.add_argument("--cache", type=pathlib.Path, default=CACHE)
    add_output_options(parser)
    options = parser.parse_args()
    with output(options):
        compare(peers, options)


def compare(peers: dict[str, _peers.Peer], options: argparse.Namespace) -> None:
    shapes = [list(map(int, shape.split("x"))) for shape in options.shapes]
    request = {"shapes": shapes} | {
        k: getattr(options, k) for k in ("m", "seconds", "ring", "program")
    }
    found, dense, missing, versions = [], [], [], {}
    for name in options.peers:
        try:
            results = measure(peers[name], request, options.cache, options.timeout)
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
        print(f"\nWeight {shape[0]} x {shape[1]}, speed relative to dense float32:\n")
        ratios = [cells(n, r, options.m) for n, r in found if r["shape"] == shape]
        print_table([head, *ratios], options.markdown)
        print("\nMicroseconds:\n")
        all_times = [
            times(n, r, options.m) for n, r in dense + found if r["shape"] == shape
        ]
        print_table([head[: 1 + len(options.m)], *all_times], options.markdown)
    print()
    bullet = "- " if options.markdown else ""
    for name, version in versions.items():
        print(f"{bullet}{name}: {version}")
    for line in missing:
        print(f"{bullet}NOT MEASURED: {line}")


if __name__ == "__main__":
    main()
