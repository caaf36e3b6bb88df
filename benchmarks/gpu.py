"""Time quantized matmuls and quantization on an NVIDIA GPU.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --m 1 --formats nf4 --peers
    python benchmarks/gpu.py --platform cpu --sizes 64x96 --gigabytes 0 --peers

The script compares eqquant with dense bfloat16 matmuls and with other libraries. It
rotates through several gigabytes of weights, so that no cache holds the next one. Each
call multiplies a group of weights with one bfloat16 activation. The order of variants
changes from round to round. Columns:

- "variant": "eqquant" is the default lowering, "XLA" the lowering without kernels, and
  "dense first" dequantizes before the matmul. "quantize" quantizes the weight.
- "us (best)": the median time in microseconds, and in parentheses the shortest.
- "GB/s": the rate at which codes and scales are read.
- "vs dense": the time of a dense bfloat16 matmul by cuBLAS over this time, both in the
  same process; above 1 is faster than dense. For "quantize": the time of a copy over
  this time.
- "error": relative to a float32 matmul with the dequantized weight.

Other libraries are installed into separate environments, which are kept. The script
lists libraries that cannot be installed.
"""

import argparse
import dataclasses
import functools as ft
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import _gpu_peers
import eqquant
import jax
import jax.numpy as jnp
from _environments import CACHE, install, last_line, run
from _gpu_formats import DEFAULT, FORMATS
from _rotation import rotation, sizes_for, summary
from _tables import add_output_options, format_row, output, print_head
from _timing import interleaved, machine
from jax import lax


HERE = pathlib.Path(__file__).resolve().parent
HEAD = "K x N", "M", "format", "variant", "us (best)", "GB/s", "vs dense", "error"
WIDTHS = 12, 5, 8, 26, 20, 7, 8, 8


def for_each_weight(product):
    """Return a jitted function that multiplies `x` with a group of weights."""
    return jax.jit(lambda x, group: [product(x, w) for w in group])


dense = for_each_weight(lambda x, w: x @ w.T)
quantized = for_each_weight(lambda x, q: x @ q.T)
dense_first = for_each_weight(lambda x, q: x @ q.dequantize().T)


def without_kernels(q):
    return eqquant.with_compute(q, gpu=eqquant.kernels.GPUKernel("xla"))


def alternating(program, x, groups, repeats: int):
    return lambda: [program(x, next(groups)) for _ in range(repeats)]


def copies(weight, gigabytes: float, count: int):
    size = sum(a.nbytes for a in jax.tree.leaves(weight))
    make = lambda: jax.tree.map(jnp.copy, weight)
    return size, rotation(make, size, gigabytes, count)


def products(weight, name: str, m: int, options) -> list[list[str]]:
    """Return the rows of a format. The first row is the dense matmul."""
    n, k = weight.shape
    x = jax.random.normal(jax.random.key(m), (m, k)).astype(weight.dtype)
    count, repeats = sizes_for(m * n * x.dtype.itemsize, options.group)
    q = eqquant.quantize(weight, **FORMATS[name])
    size, dense_groups = copies(weight, options.gigabytes, count)
    calls: dict[str, Callable[[], object]] = {}
    calls["dense"] = alternating(dense, x, dense_groups, repeats)
    sizes, programs = {"dense": size}, {}
    for variant, program, array in (
        ("eqquant", quantized, q),
        ("XLA", quantized, without_kernels(q)),
        ("dense first", dense_first, q),
    ):
        sizes[variant], groups = copies(array, options.gigabytes, count)
        calls[variant] = alternating(program, x, groups, repeats)
        programs[variant] = program, array
    times = interleaved(calls, seconds=options.seconds * len(calls))
    summaries = {name: summary(runs, count * repeats) for name, runs in times.items()}
    with jax.default_matmul_precision("highest"):
        wide = dataclasses.replace(q, dtype=jnp.dtype("float32"))
        exact = x.astype(jnp.float32) @ wide.dequantize().T
    rows = []
    for variant, (median, best) in summaries.items():
        error = ""
        if variant in programs:
            program, array = programs[variant]
            (out,) = program(x, (array,))
            difference = jnp.linalg.norm(out.astype(jnp.float32) - exact)
            error = f"{float(difference / jnp.linalg.norm(exact)):.0e}"
        speed = f"{sizes[variant] / median / 1e3:.0f}"
        ratio = f"{summaries['dense'][0] / median:.2f}"
        time = f"{median:.1f} ({best:.1f})"
        rows.append([f"{k}x{n}", m, name, variant, time, speed, ratio, error])
    return rows


def encoding(weight, name: str, options) -> list[str]:
    n, k = weight.shape
    weight = weight.astype(jnp.float32)
    _, groups = copies(weight, options.gigabytes, 1)
    quantize = ft.partial(eqquant.quantize, check_finite=False, **FORMATS[name])
    encode = jax.jit(lambda group: quantize(group[0]))
    copy = jax.jit(lambda group: lax.optimization_barrier(jnp.copy(group[0])))
    times = interleaved(
        {"copy": lambda: copy(next(groups)), "encode": lambda: encode(next(groups))},
        seconds=2 * options.seconds,
    )
    copied, _ = summary(times["copy"], 1)
    median, best = summary(times["encode"], 1)
    time = f"{median:.1f} ({best:.1f})"
    speed = f"{weight.nbytes / median / 1e3:.0f}"
    ratio = f"{copied / median:.2f}"
    return [f"{k}x{n}", "", name, "quantize", time, speed, ratio, ""]


def peer_rows(peer, options, sizes) -> list[list[str]]:
    """Time another library in its own environment.

    Raise a `RuntimeError` if the library cannot be installed or fails.
    """
    python = install(f"gpu-{peer.name}", peer.packages, options.cache)
    request = dict(platform=options.platform, sizes=sizes, m=options.m)
    request |= dict(seconds=options.seconds, gigabytes=options.gigabytes)
    request |= dict(group=options.group)
    ran = run(
        python,
        str(HERE / "_measure_gpu_peer.py"),
        peer.name,
        json.dumps(request),
        environment={},
        capture_output=True,
        timeout=options.timeout,
    )
    if ran.returncode:
        raise RuntimeError(f"fails: {last_line(ran.stderr)}")
    lines = [line for line in ran.stdout.splitlines() if line.startswith("[")]
    return [json.loads(line) for line in lines]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--platform", default="gpu", choices=["gpu", "cpu"])
    parser.add_argument(
        "--sizes", nargs="+", default=["4096x14336", "8192x8192"], help="KxN"
    )
    parser.add_argument(
        "--m", type=int, nargs="+", default=[1, 16, 64, 2048], help="rows of x"
    )
    parser.add_argument("--formats", nargs="+", default=DEFAULT, choices=FORMATS)
    parser.add_argument(
        "--gigabytes", type=float, default=4, help="size of the weights in rotation"
    )
    parser.add_argument("--group", type=int, default=32, help="matmuls in a call")
    parser.add_argument("--seconds", type=float, default=1, help="for each entry")
    names = [peer.name for peer in _gpu_peers.peers]
    parser.add_argument("--peers", nargs="*", default=names, choices=names)
    parser.add_argument("--timeout", type=float, default=3600, help="for each peer")
    parser.add_argument("--cache", type=pathlib.Path, default=CACHE)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    if jax.default_backend() != options.platform:
        sys.exit(
            f"--platform gpu: JAX found no GPU, only {jax.default_backend()!r}. Use "
            "--platform cpu to test the script."
            if options.platform == "gpu"
            else "--platform cpu: set JAX_PLATFORMS=cpu."
        )
    with output(options):
        print(f"{machine()}; {options.gigabytes} GB of each weight in rotation\n")
        print_head(HEAD, WIDTHS, options.markdown)
        missing = []
        for row in all_rows(options, missing):
            print(format_row(row, WIDTHS, options.markdown), flush=True)
        if missing:
            print("\n" + "\n".join(missing))


def all_rows(options, missing: list[str]) -> Iterator[list]:
    """Yield the rows of the table. Append a line to `missing` per failed library."""
    sizes = [list(map(int, size.split("x"))) for size in options.sizes]
    for k, n in sizes:
        weight = jax.random.normal(jax.random.key(0), (n, k)).astype(jnp.bfloat16)
        for name in options.formats:
            for m in options.m:
                yield from products(weight, name, m, options)
            yield encoding(weight, name, options)
    for peer in _gpu_peers.peers:
        if peer.name not in options.peers:
            continue
        try:
            yield from peer_rows(peer, options, sizes)
        except (RuntimeError, subprocess.TimeoutExpired, OSError) as problem:
            missing.append(f"NOT MEASURED: {peer.name}: {problem}")


if __name__ == "__main__":
    main()
