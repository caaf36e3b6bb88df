"""Measure the cost of straight-through rounding of weights.

    python benchmarks/rounding.py                   # time, against a copy
    python benchmarks/rounding.py --chips v5e v6e   # additional bytes on a TPU

The row "int8, low precision" rounds to the codes of `eqquant.training.low_precision`.
"GB/s" is the rate at which float32 weights are read.

With `--chips`, entries are the additional bytes per weight that the compiler counts in
the value and gradients of a 2048 x 2048 layer with 64 tokens. One read and one write of
a float32 are 8 bytes. This needs libtpu, but no TPU. The script emulates several
devices, because the program for one device contains loops, which XLA counts only once.
"""

import argparse
import functools as ft

import eqquant
import jax
import jax.numpy as jnp
from _tables import add_output_options, output, print_table
from _timing import interleaved, machine, median
from eqquant.debug import compile_for_tpu
from eqquant.training.rounded._int8 import round_int8


FORMATS = ("int8", "nf4", "ternary", "binary")


def rounded(format: str):
    return ft.partial(eqquant.straight_through, format=format, check_finite=False)


def print_times(size: int, markdown: bool) -> None:
    weight = jax.random.normal(jax.random.key(0), (size, size))
    print(f"{machine()}; {size} x {size} float32\n")
    # The addition prevents XLA from replacing the copy with an alias or a memcpy.
    compiled = {"copy": jax.jit(lambda weight: weight + 1)}
    compiled |= {format: jax.jit(rounded(format)) for format in FORMATS}
    compiled["int8, low precision"] = jax.jit(ft.partial(round_int8, axis=-1))
    runs = {name: ft.partial(fn, weight) for name, fn in compiled.items()}
    times = interleaved(runs, seconds=5)
    table = [["format", "ms", "GB/s", "vs copy"]]
    for name, runs in times.items():
        seconds = median(runs)
        ratio, rate = seconds / median(times["copy"]), weight.nbytes / seconds / 1e9
        table.append([name, f"{seconds * 1e3:.2f}", f"{rate:.1f}", f"{ratio:.2f}"])
    print_table(table, markdown)


def bytes_of_step(format: str | None, chip: str) -> float:
    @ft.partial(jax.value_and_grad, argnums=(0, 1))
    def step(weight, x):
        weight = weight if format is None else rounded(format)(weight)
        return jnp.sum((x @ weight.T) ** 2)

    shapes = [jax.ShapeDtypeStruct((n, 2048), jnp.float32) for n in (2048, 64)]
    compiled = compile_for_tpu(step, *shapes, chip=chip)
    return compiled.cost_analysis()["bytes accessed"] / 2048**2


def print_bytes(chips: list[str], markdown: bool) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    table = [["format", *chips]]
    for format in FORMATS:
        added = [bytes_of_step(format, c) - bytes_of_step(None, c) for c in chips]
        table.append([format, *(f"{nbytes:.1f}" for nbytes in added)])
    print_table(table, markdown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096, help="rows and columns")
    parser.add_argument("--chips", nargs="+", default=[], help="names of TPUs")
    add_output_options(parser)
    options = parser.parse_args()
    with output(options):
        if options.chips:
            print_bytes(options.chips, options.markdown)
        else:
            print_times(options.size, options.markdown)


if __name__ == "__main__":
    main()
