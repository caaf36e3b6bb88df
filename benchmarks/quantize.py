"""How fast arrays are quantized: bytes read per second, against a plain copy.

    python benchmarks/quantize.py --megabytes 64

Medians, and in parentheses those of the fastest runs, which other work on the machine
disturbs less; MB are of temporaries.
"""

import argparse
import functools as ft

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
from _timing import interleaved, machine, median


FORMATS = {
    "int8": eqquant.Int8(),
    "int8 block 64": eqquant.Int8(block_size=64),
    "nf4": eqquant.NF4(),
    "nf4 searched": eqquant.NF4(scale_search=True),
    "nf4 double": eqquant.NF4(double_quantization=True),
    "nf4 both": eqquant.NF4(scale_search=True, double_quantization=True),
    "ternary": eqquant.Ternary(),
    "ternary absmean": eqquant.Ternary(rule="absmean"),
    "binary": eqquant.Binary(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64, help="of float32")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    options = parser.parse_args()

    rows = options.megabytes * 2**20 // 4 // 4096
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.standard_normal((rows, 4096), dtype=np.float32))
    copy = jax.jit(jnp.copy)
    print(f"{machine()}; {rows} x 4096 float32, {weight.nbytes / 1e6:.0f} MB")
    print(f"{'format':<16}{'GB/s (best)':>15}{'of a copy (best)':>18}{'MB':>7}")
    for name in options.formats:
        format = FORMATS[name]
        quantize = ft.partial(eqquant.quantize, format=format, check_finite=False)
        compiled = jax.jit(quantize).lower(weight).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        times = interleaved(
            {
                "copy": lambda: copy(weight),
                # An eager call: the check for finite values is part of it.
                "quantize": lambda f=format: eqquant.quantize(weight, f),
            }
        )
        cells = []
        for of in (median, min):
            seconds = of(times["quantize"])
            cells.append((weight.nbytes / seconds / 1e9, of(times["copy"]) / seconds))
        (speed, ratio), (fastest, fastest_ratio) = cells
        print(
            f"{name:<16}{speed:>7.2f} ({fastest:>5.2f}){ratio:>10.2f} "
            f"({fastest_ratio:>5.2f}){temporary / 2**20:>7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
