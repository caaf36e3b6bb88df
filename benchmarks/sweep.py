"""Find formats, shapes and numbers of rows that are slower than dense float32.

    python benchmarks/sweep.py --clock cpu
    python benchmarks/sweep.py --formats fp8 --m 1 64 --shapes 384x1536 --only-below
    EQQUANT_CPU=avx512 taskset -c 0 python benchmarks/sweep.py --clock cpu

An entry is the time of the dense float32 matmul over the time of the quantized matmul;
above 1 is faster than dense. Entries below `--below` are listed at the end with the
kernel that computed them.

`--clock cpu` measures the CPU time of all threads of the process. Other work on the
machine affects it only through the caches. With `taskset -c 0`, the process has one
thread, and no thread waits for another.

A program repeats small matmuls in sequence, as a model does, so that the time to call a
program from Python does not dominate.
"""

import argparse
import csv
import functools as ft
import time

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
from _tables import add_output_options, format_row, output, print_head
from _timing import interleaved, machine, median
from eqquant import formats
from matmul import dense, dense_transposed, product, product_transposed


AFFINE = {"affine": True, "unsigned": True}
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
    "int5": formats.Int5(),
    "int6": formats.Int6(),
    "q2_k": eqquant.Int2(16, **AFFINE, double_quantization="k"),
    "q3_k": eqquant.Int3(16, double_quantization="k"),
    "q4_k": eqquant.Int4(32, **AFFINE, double_quantization="k"),
    "q6_k": formats.Int6(16, double_quantization="k"),
    "trellis2": formats.Trellis(bits=2),
    "trellis3": formats.Trellis(bits=3),
    "trellis4": formats.Trellis(bits=4),
}
SHAPES = "256x256 256x4096 4096x256 384x384 384x1536 1536x384 1024x1024 4096x4096"
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
DIRECTIONS = {"x@w.T": (dense, product), "x@w": (dense_transposed, product_transposed)}
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
# Repeat matmuls until a program has this number of multiplications, about ten
# microseconds of work.
MIN_MULTIPLICATIONS, MAX_REPEATS = 2**22, 8


def program(multiply, repeats: int):
    """Return a program of `repeats` matmuls, in which each depends on the last."""

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
        help="shapes of the weight: rows x columns",
    )
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each entry")
    parser.add_argument("--below", type=float, default=1.0, help="list these entries")
    parser.add_argument(
        "--only-below", action="store_true", help="print only rows with such an entry"
    )
    parser.add_argument("--csv", help="a file to write the entries to")
    add_output_options(parser)
    options = parser.parse_args()
    with output(options):
        cells = measure_all(options)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["format", "precision", "shape", "direction", "m", "ratio", "kernel"]
            )
            writer.writerows(cells)


def measure_all(options: argparse.Namespace) -> list[tuple]:
    clock = "CPU time" if options.clock == "cpu" else "wall-clock time"
    print(f"{machine()}; {eqquant.kernels.cpu.status()}")
    print(f"Speed relative to dense float32, in {clock}:\n")
    head = "shape", "product", "format", "precision", *(f"M={m}" for m in options.m)
    widths = 10, 6, 12, 9, *(7 for _ in options.m)
    print_head(head, widths, options.markdown)
    cells = []
    for shape in options.shapes:
        rows, columns = map(int, shape.split("x"))
        weight = jax.random.normal(jax.random.key(0), (rows, columns))
        variants = {
            (name, precision): eqquant.quantize(
                weight, FORMATS[name], precision=precision
            )
            for name in options.formats
            for precision in options.precisions
        }
        for direction in options.directions:
            table = {
                m: _measure(weight, variants, direction, m, options) for m in options.m
            }
            for name, precision in variants:
                entries = {m: table[m][name, precision] for m in options.m}
                for m, (ratio, kernel) in entries.items():
                    cells.append((name, precision, shape, direction, m, ratio, kernel))
                ratios = [ratio for ratio, _ in entries.values()]
                if options.only_below and min(ratios) >= options.below:
                    continue
                row = shape, direction, name, precision, *(f"{r:.2f}" for r in ratios)
                print(format_row(row, widths, options.markdown), flush=True)
    below = sorted((c for c in cells if c[5] < options.below), key=lambda c: c[5])
    print(f"\n{len(below)} of {len(cells)} entries are below {options.below}:\n")
    bullet = "- " if options.markdown else ""
    for name, precision, shape, direction, m, ratio, kernel in below:
        place = f"{name}, {precision}, {shape}, {direction}, M={m}"
        print(f"{bullet}{ratio:.2f}  {place}: {kernel}")
    return cells


def _measure(weight, variants, direction, m, options):
    """Return the speed relative to dense, and the kernel, of each variant."""
    dense_matmul, quantized_matmul = DIRECTIONS[direction]
    size = weight.shape[1 if direction == "x@w.T" else 0]
    x = jnp.asarray(np.random.default_rng(m).standard_normal((m, size), np.float32))
    repeats = int(np.clip(MIN_MULTIPLICATIONS // (m * weight.size), 1, MAX_REPEATS))
    baseline, quantized = (
        program(dense_matmul, repeats),
        program(quantized_matmul, repeats),
    )
    calls = {"dense": ft.partial(baseline, x, weight)}
    kernels = {}
    for variant, q in variants.items():
        calls[variant] = ft.partial(quantized, x, q)
        text = eqquant.debug.explain(quantized_matmul, x, q, platform="cpu")
        kernels[variant] = text.partition(": ")[2]
    times = interleaved(
        calls,
        seconds=options.seconds * len(calls),
        at_least=3,
        clock=CLOCKS[options.clock],
    )
    medians = {name: median(runs) for name, runs in times.items()}
    return {v: (medians["dense"] / medians[v], kernels[v]) for v in variants}


if __name__ == "__main__":
    main()
