"""Every format, shape and number of rows, against the dense product: what is slower?

    python benchmarks/sweep.py --clock cpu
    python benchmarks/sweep.py --formats fp8 --m 1 64 --shapes 384x1536 --only-below
    EQQUANT_CPU=avx512 taskset -c 0 python benchmarks/sweep.py --clock cpu

An entry is the time of the dense float32 product over that of this one: above 1 is
faster than dense. Cells below `--below` are listed at the end, with the kernel that
served them.

`--clock cpu` takes the time for which all threads of the process computed. Other work
on the machine does not count in it, as long as it leaves the caches alone. With
`taskset -c 0` there is one thread, and so none that waits for another.

Small products are measured several to a program, one after the other, as in a model:
what Python takes to call a program is no part of a product.
"""

import argparse
import csv
import dataclasses
import functools as ft
import time

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
from _timing import interleaved, machine, median
from matmul import dense, dense_transposed, product, product_transposed


FORMATS = {
    "int8": eqquant.Int8(),
    "nf4": eqquant.NF4(),
    "int4": eqquant.Int4(),
    "int4 affine": eqquant.Int4(affine=True),
    "int3": eqquant.Int3(fit="absmax"),
    "nf3": eqquant.NF3(),
    "fp8": eqquant.FP8(),
    "ternary": eqquant.Ternary(),
    "binary": eqquant.Binary(),
    "int8 b128": eqquant.Int8(block_size=128),
    "int3 row": eqquant.Int3(fit="absmax", block_size=None),
    "int2": eqquant.Int2(fit="absmax"),
    "nf2": eqquant.NF2(),
    "mxfp4": eqquant.MXFP4(),
    "nvfp4": eqquant.NVFP4(),
}
SHAPES = "256x256 256x4096 4096x256 384x384 384x1536 1536x384 1024x1024 4096x4096"
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
DIRECTIONS = {"x@w.T": (dense, product), "x@w": (dense_transposed, product_transposed)}
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
# So many multiplications take a program at least: some ten microseconds.
ENOUGH, MOST_REPEATS = 2**22, 8


def program(multiply, repeats: int):
    """So many products, each of which waits for the one before."""

    def run(first, w):
        x = first
        for _ in range(repeats - 1):
            x = first + 1e-30 * multiply(x, w)[:, :1]
        return multiply(x, w)

    return jax.jit(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS)
    )
    parser.add_argument("--precisions", nargs="+", default=["high", "default"])
    parser.add_argument(
        "--directions", nargs="+", default=list(DIRECTIONS), choices=list(DIRECTIONS)
    )
    parser.add_argument("--m", type=int, nargs="+", default=ROWS, help="rows of x")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=SHAPES.split(),
        help="of the weight: rows x columns",
    )
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each entry")
    parser.add_argument("--below", type=float, default=1.0, help="what to list")
    parser.add_argument(
        "--only-below", action="store_true", help="print no line without such a cell"
    )
    parser.add_argument("--csv", help="a file to write the cells to as well")
    options = parser.parse_args()

    unit = "CPU time" if options.clock == "cpu" else "time"
    print(f"{machine()}; {eqquant.kernels.cpu.status()}")
    print(f"times as fast as dense float32, by {unit}")
    cells = []
    for shape in options.shapes:
        rows, columns = map(int, shape.split("x"))
        weight = jax.random.normal(jax.random.key(0), (rows, columns))
        variants = {
            (name, precision): eqquant.quantize(
                weight, dataclasses.replace(FORMATS[name], precision=precision)
            )
            for name in options.formats
            for precision in options.precisions
        }
        for direction in options.directions:
            table = {
                m: _measure(weight, variants, direction, m, options) for m in options.m
            }
            for name, precision in variants:
                of_row = {m: table[m][name, precision] for m in options.m}
                for m, (ratio, kernel) in of_row.items():
                    cells.append((name, precision, shape, direction, m, ratio, kernel))
                ratios = [ratio for ratio, _ in of_row.values()]
                if options.only_below and min(ratios) >= options.below:
                    continue
                head = f"{shape:<10}{direction:<6}{name:<12}{precision:<8}"
                print(head + "".join(f"{ratio:>7.2f}" for ratio in ratios), flush=True)
    below = sorted((c for c in cells if c[5] < options.below), key=lambda c: c[5])
    print(f"\n{len(below)} of {len(cells)} cells are below {options.below}:")
    for name, precision, shape, direction, m, ratio, kernel in below:
        print(
            f"{ratio:.2f}  {name}, {precision}, {shape}, {direction}, M={m}: {kernel}"
        )
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["format", "precision", "shape", "direction", "m", "ratio", "kernel"]
            )
            writer.writerows(cells)


def _measure(weight, variants, direction, m, options):
    """For each variant how many times as fast it is, and its kernel."""
    by_floats, by_codes = DIRECTIONS[direction]
    size = weight.shape[1 if direction == "x@w.T" else 0]
    x = jnp.asarray(np.random.default_rng(m).standard_normal((m, size), np.float32))
    repeats = int(np.clip(ENOUGH // (m * weight.size), 1, MOST_REPEATS))
    baseline, quantized = program(by_floats, repeats), program(by_codes, repeats)
    calls = {"dense": ft.partial(baseline, x, weight)}
    kernels = {}
    for variant, q in variants.items():
        calls[variant] = ft.partial(quantized, x, q)
        said = eqquant.debug.explain(by_codes, x, q, platform="cpu")
        kernels[variant] = said.partition(": ")[2]
    times = interleaved(
        calls,
        seconds=options.seconds * len(calls),
        at_least=3,
        clock=CLOCKS[options.clock],
    )
    typical = {name: median(some) for name, some in times.items()}
    return {v: (typical["dense"] / typical[v], kernels[v]) for v in variants}


if __name__ == "__main__":
    main()
