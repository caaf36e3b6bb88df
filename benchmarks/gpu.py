"""Products with quantized weights on an NVIDIA GPU, and quantizing, beside dense
products in bfloat16 and other libraries, in one run.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --m 1 --formats nf4 --peers
    python benchmarks/gpu.py --platform cpu --sizes 64x96 --gigabytes 0 --peers

Weights take turns, several gigabytes of them, so that no cache has the next one; a call
multiplies some by one activation, in bfloat16. Medians of many calls, in an order that
changes from round to round, and in parentheses the fastest. Of each product:

- "eqquant" is what a user gets, "XLA" the lowering without kernels, "dense first"
  dequantizes and leaves the product to XLA;
- GB/s are of codes and scales;
- "of dense" is beside the dense product in bfloat16, which XLA or PyTorch leaves to
  cuBLAS, in the same process: above 1 is faster;
- the error is relative to the float32 product with the dequantized weight.

"encode" is quantizing, beside a copy of what is quantized. Other libraries are
installed into environments of their own, which are kept; what cannot be installed is
named.
"""

import argparse
import dataclasses
import functools as ft
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence

import _gpu_peers
import eqquant
import jax
import jax.numpy as jnp
from _environments import CACHE, install, last_line, run
from _rotation import rotation, sizes_for, summary
from _timing import interleaved, machine
from jax import lax


HERE = pathlib.Path(__file__).resolve().parent
FORMATS = {
    "int8": eqquant.Int8(),
    "nf4": eqquant.NF4(),
    "ternary": eqquant.Ternary(),
    "binary": eqquant.Binary(),
    "w8a8": eqquant.Int8(activations="int8"),
}
HEAD = "K x N", "M", "weight", "by", "us (best)", "GB/s", "of dense", "error"
WIDTHS = 12, 5, 8, 26, 20, 7, 8, 8


def each(product):
    """A program: an activation times each weight of a group."""
    return jax.jit(lambda x, group: [product(x, w) for w in group])


dense = each(lambda x, w: x @ w.T)
quantized = each(lambda x, q: x @ q.T)
dense_first = each(lambda x, q: x @ q.dequantize().T)


def by_xla(q):
    kernel = eqquant.kernels.GPUKernel("xla")
    return q.replace(format=dataclasses.replace(q.format, gpu=kernel))


def turns(program, x, groups, repeats: int):
    return lambda: [program(x, next(groups)) for _ in range(repeats)]


def copies(weight, gigabytes: float, count: int):
    size = sum(a.nbytes for a in jax.tree.leaves(weight))
    make = lambda: jax.tree.map(jnp.copy, weight)
    return size, rotation(make, size, gigabytes, count)


def products(weight, name: str, m: int, options) -> list[list[str]]:
    """The rows of a format, the dense product beside it first."""
    n, k = weight.shape
    x = jax.random.normal(jax.random.key(m), (m, k)).astype(weight.dtype)
    count, repeats = sizes_for(m * n * x.dtype.itemsize, options.group)
    q = eqquant.quantize(weight, FORMATS[name])
    size, of_dense = copies(weight, options.gigabytes, count)
    calls: dict[str, Callable[[], object]] = {}
    calls["dense"] = turns(dense, x, of_dense, repeats)
    sizes, programs = {"dense": size}, {}
    for by, program, form in (
        ("eqquant", quantized, q),
        ("XLA", quantized, by_xla(q)),
        ("dense first", dense_first, q),
    ):
        sizes[by], groups = copies(form, options.gigabytes, count)
        calls[by] = turns(program, x, groups, repeats)
        programs[by] = program, form
    times = interleaved(calls, seconds=options.seconds * len(calls))
    of = {by: summary(taken, count * repeats) for by, taken in times.items()}
    with jax.default_matmul_precision("highest"):
        wide = dataclasses.replace(q, dtype=jnp.dtype("float32"))
        exact = x.astype(jnp.float32) @ wide.dequantize().T
    rows = []
    for by, (median, best) in of.items():
        error = ""
        if by in programs:
            program, form = programs[by]
            (out,) = program(x, (form,))
            wrong = jnp.linalg.norm(out.astype(jnp.float32) - exact)
            error = f"{float(wrong / jnp.linalg.norm(exact)):.0e}"
        speed = f"{sizes[by] / median / 1e3:.0f}"
        ratio = f"{of['dense'][0] / median:.2f}"
        shown = f"{median:.1f} ({best:.1f})"
        rows.append([f"{k}x{n}", m, name, by, shown, speed, ratio, error])
    return rows


def encoding(weight, name: str, options) -> list[str]:
    n, k = weight.shape
    weight = weight.astype(jnp.float32)
    _, groups = copies(weight, options.gigabytes, 1)
    quantize = ft.partial(eqquant.quantize, format=FORMATS[name], check_finite=False)
    encode = jax.jit(lambda group: quantize(group[0]))
    copy = jax.jit(lambda group: lax.optimization_barrier(jnp.copy(group[0])))
    times = interleaved(
        {"copy": lambda: copy(next(groups)), "encode": lambda: encode(next(groups))},
        seconds=2 * options.seconds,
    )
    copied, _ = summary(times["copy"], 1)
    median, best = summary(times["encode"], 1)
    shown = f"{median:.1f} ({best:.1f})"
    speed = f"{weight.nbytes / median / 1e3:.0f}"
    ratio = f"{copied / median:.2f}"
    return [f"{k}x{n}", "", name, "encode, of a copy", shown, speed, ratio, ""]


def of_peer(peer, options, sizes) -> list[list[str]]:
    """Another library, in its own environment; a `RuntimeError` says why not."""
    python = install(f"gpu-{peer.name}", peer.packages, options.cache)
    asked = dict(platform=options.platform, sizes=sizes, m=options.m)
    asked |= dict(seconds=options.seconds, gigabytes=options.gigabytes)
    asked |= dict(group=options.group)
    ran = run(
        python,
        str(HERE / "_measure_gpu_peer.py"),
        peer.name,
        json.dumps(asked),
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
    parser.add_argument("--m", type=int, nargs="+", default=[1, 16, 64, 2048])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--gigabytes", type=float, default=4, help="in rotation")
    parser.add_argument("--group", type=int, default=32, help="products in a call")
    parser.add_argument("--seconds", type=float, default=1, help="for each entry")
    names = [peer.name for peer in _gpu_peers.peers]
    parser.add_argument("--peers", nargs="*", default=names, choices=names)
    parser.add_argument("--timeout", type=float, default=3600, help="for each peer")
    parser.add_argument("--cache", type=pathlib.Path, default=CACHE)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    if jax.default_backend() != options.platform:
        sys.exit(
            f"benchmarks/gpu.py needs a GPU, and JAX has none here, but a "
            f"{jax.default_backend()}; `--platform cpu` only tries the script out."
            if options.platform == "gpu"
            else "benchmarks/gpu.py --platform cpu needs JAX_PLATFORMS=cpu."
        )

    line, join = ("| {} |", " | ".join) if options.markdown else ("{}", "  ".join)
    show = lambda cells: print(
        line.format(join(f"{c:>{w}}" for c, w in zip(cells, WIDTHS, strict=True))),
        flush=True,
    )
    print(f"{machine()}; {options.gigabytes} GB of each weight in rotation\n")
    show(HEAD)
    if options.markdown:
        show(["---"] * len(HEAD))
    sizes = [list(map(int, size.split("x"))) for size in options.sizes]
    for k, n in sizes:
        weight = jax.random.normal(jax.random.key(0), (n, k)).astype(jnp.bfloat16)
        for name in options.formats:
            for m in options.m:
                for row in products(weight, name, m, options):
                    show(row)
            show(encoding(weight, name, options))
    for peer in _gpu_peers.peers:
        if peer.name not in options.peers:
            continue
        try:
            for row in of_peer(peer, options, sizes):
                show(row)
        except (RuntimeError, subprocess.TimeoutExpired, OSError) as problem:
            print(f"NOT MEASURED: {peer.name}: {problem}", flush=True)


if __name__ == "__main__":
    main()
