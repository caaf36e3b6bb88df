"""Measure the rotation of activations, and products with rotated weights.

    python benchmarks/hadamard.py

"rotation" is `hadamard` on a float32 activation, and "products" is the same transform
as XLA computes it elsewhere: products with a matrix of at most 128 by 128 values.
"NF4" is the product of the activation with a square weight, and "rotated" is the
product with a rotated weight, including the rotation. Each entry is the median time of
one of many runs in a program, in microseconds.
"""

import argparse
import functools as ft
from collections.abc import Callable

import eqquant
import jax
from _tables import add_output_options, format_row, output, print_head
from _timing import interleaved, machine, median
from eqquant.arrays import hadamard, hadamard_block, RotatedArray
from eqquant.primitives import hadamard_by_products
from jax import lax


SIZES = 576, 1536, 2048, 4096
ROWS = 1, 8, 64, 512
HEAD = "size", "block", "rows", "rotation", "products", "ratio", "NF4", "rotated"
WIDTHS = 5, 5, 4, 8, 8, 5, 8, 8


def repeated(fn: Callable, runs: int) -> Callable:
    """Return a program that applies `fn` to its own result `runs` times."""
    return jax.jit(
        lambda x, *args: lax.fori_loop(0, runs, lambda _, x: fn(x, *args), x)
    )


def measure(size: int, rows: int) -> list[str]:
    block = hadamard_block(size)
    key = jax.random.key(0)
    x = jax.random.normal(key, (rows, size))
    weight = jax.random.normal(key, (size, size)) / size**0.5
    plain = eqquant.quantize(weight, "nf4")
    rotated = RotatedArray(eqquant.quantize(hadamard(weight, -1, block), "nf4"), block)
    runs = max(2, 400 // rows)
    multiply = lambda x, w: x @ w.T
    rotate = ft.partial(hadamard, axis=-1, block=block)
    programs = {
        "rotation": (repeated(rotate, runs), x),
        "products": (repeated(ft.partial(hadamard_by_products, block=block), runs), x),
        "NF4": (repeated(multiply, runs), x, plain),
        "rotated": (repeated(multiply, runs), x, rotated),
    }
    calls = {name: ft.partial(fn, *args) for name, (fn, *args) in programs.items()}
    times = interleaved(calls, seconds=0.5)
    each = {name: 1e6 * median(seconds) / runs for name, seconds in times.items()}
    cells = [f"{each[name]:.1f}" for name in programs]
    ratio = f"{each['products'] / each['rotation']:.1f}"
    return [str(size), str(block), str(rows), *cells[:2], ratio, *cells[2:]]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    with output(options):
        print(f"{machine()}\n")
        print_head(HEAD, WIDTHS, options.markdown)
        for size in options.sizes:
            for rows in options.rows:
                cells = measure(size, rows)
                print(format_row(cells, WIDTHS, options.markdown), flush=True)


if __name__ == "__main__":
    main()
