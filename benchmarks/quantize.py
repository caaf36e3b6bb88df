"""Measure the speed of quantization in bytes read per second, against a copy.

    python benchmarks/quantize.py --megabytes 64

Entries are medians, and in parentheses the fastest runs, which other work on the
machine affects less. "MB" is temporary memory.
"""

import argparse
import functools as ft

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
from _tables import add_output_options, format_row, output, print_head
from _timing import interleaved, machine, median


FORMATS = {
    "int8": eqquant.Int8(),
    "int8 block 64": eqquant.Int8(block_size=64),
    "nf4": eqquant.NF4(),
    "nf4 searched": eqquant.NF4(fit="search"),
    "nf4 double": eqquant.NF4(double_quantization=True),
    "nf4 both": eqquant.NF4(fit="search", double_quantization=True),
    "ternary": eqquant.Ternary(),
    "ternary absmean": eqquant.Ternary(rule="absmean"),
    "binary": eqquant.Binary(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64, help="size of the array")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    add_output_options(parser)
    options = parser.parse_args()
    with output(options):
        measure(options)


HEAD = "format", "GB/s (best)", "vs copy (best)", "MB"
WIDTHS = 16, 15, 18, 7


def measure(options: argparse.Namespace) -> None:
    rows = options.megabytes * 2**20 // 4 // 4096
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.standard_normal((rows, 4096), dtype=np.float32))
    copy = jax.jit(jnp.copy)
    print(f"{machine()}; {rows} x 4096 float32, {weight.nbytes / 1e6:.0f} MB")
    print()
    print_head(HEAD, WIDTHS, options.markdown)
    for name in options.formats:
        format = FORMATS[name]
        quantize = ft.partial(eqquant.quantize, format=format, check_finite=False)
        compiled = jax.jit(quantize).lower(weight).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        times = interleaved(
            {
                "copy": lambda: copy(weight),
                # An eager call includes the check for finite values.
                "quantize": lambda f=format: eqquant.quantize(weight, f),
            }
        )
        cells = []
        for statistic in (median, min):
            seconds = statistic(times["quantize"])
            ratio = statistic(times["copy"]) / seconds
            cells.append((weight.nbytes / seconds / 1e9, ratio))
        (speed, ratio), (fastest, fastest_ratio) = cells
        row = name, f"{speed:.2f} ({fastest:.2f})", f"{ratio:.2f} ({fastest_ratio:.2f})"
        row = *row, f"{temporary / 2**20:.1f}"
        print(format_row(row, WIDTHS, options.markdown), flush=True)


if __name__ == "__main__":
    main()
