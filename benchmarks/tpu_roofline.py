"""How close the kernels for TPUs come to the roofline, by the compiler's own schedule.

    python benchmarks/tpu_roofline.py
    python benchmarks/tpu_roofline.py --chips v5e --m 8 16 --size 4096 4096

Needs libtpu, but no TPU: the kernels are compiled ahead of time, and the time follows
from the schedule (see `_schedule.py`). That is a model, not a measurement: trust the
cycles and the ranking rather than the microseconds.

Cycles are of one grid step: of the instructions, of the matrix units, and of the
transfers from memory; the longest of the three decides. The roofline is the time to
move every byte once, or to multiply at the peak rate in bfloat16, whichever is longer.
"dense" is a Pallas kernel for bfloat16, compiled the same way. What is done to the
activation before, outside of the kernel, is not counted.
"""

import argparse
import dataclasses

import eqquant
import jax
import jax.numpy as jnp
from _schedule import CORES, estimate
from eqquant.debug import compile_for_tpu
from eqquant.kernels import tpu
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


FORMATS = ("int8", "nf4", "ternary", "binary")


def dense(x, w):
    """`x @ w`, tile by tile."""
    (m, k), (_, n) = x.shape, w.shape
    bm, bn, bk = min(m, 2048), int(__import__("os").environ.get("DBN","512")), k if m <= 256 else 1024

    def kernel(x, w, out, total):
        @pl.when(pl.program_id(2) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += lax.dot(x[...], w[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == k // bk - 1)
        def _():
            out[...] = total[...].astype(out.dtype)

    return pl.pallas_call(
        kernel,
        grid=(m // bm, n // bn, k // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=2**26,
        ),
        name="dense",
    )(x, w)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", default=["v5e", "v6e", "v5p", "TPU7x"])
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--m", type=int, nargs="+", default=[8, 16, 256, 2048])
    parser.add_argument("--size", type=int, nargs=2, default=(4096, 14336))
    options = parser.parse_args()
    k, n = options.size

    print(
        f"K={k}, N={n}, bfloat16 activations; times as fast as a dense bfloat16 kernel"
    )
    header = "step  matrix transfer      MB      us  roofline  speed"
    print(f"{'chip':<6}{'M':>5} {'format':<8}{'precision':<10}{header:>50}")
    for chip in options.chips:
        core = CORES[chip]
        for m in options.m:
            x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
            w = jax.ShapeDtypeStruct((k, n), jnp.bfloat16)
            baseline = estimate(dense, x, w, chip=chip, compile=compile_for_tpu)
            report(chip, core, m, k, n, "dense", "", 2 * k * n, baseline, baseline)
            for name in options.formats:
                for precision in ("high", "default"):
                    q = jax.eval_shape(
                        lambda name=name: eqquant.quantize(
                            jnp.zeros((n, k), jnp.bfloat16), name, check_finite=False
                        )
                    )
                    format = dataclasses.replace(q.format, precision=precision)

                    def product(x, codes, scales, format=format):
                        return tpu.dot(
                            x,
                            codes,
                            scales,
                            format=format,
                            contract_rows=False,
                            precision=format.precision,
                            weight_dtype=x.dtype,
                            out_dtype=x.dtype,
                        )

                    result = estimate(
                        product,
                        x,
                        q.codes,
                        q.scales,
                        chip=chip,
                        compile=compile_for_tpu,
                    )
                    report(
                        chip, core, m, k, n, name, precision, q.nbytes, result, baseline
                    )


def report(chip, core, m, k, n, name, precision, weight_bytes, result, baseline):
    moved = weight_bytes + 2 * m * (k + n)
    ideal = max(
        moved / core.bytes_per_second, m * k * n / core.macs_per_cycle / core.hertz
    )
    print(
        f"{chip:<6}{m:>5} {name:<8}{precision:<10}{result.step_cycles:>8.0f}"
        f"{result.matrix_cycles:>8.0f}{result.transfer_cycles:>9.0f}"
        f"{result.bytes_moved / 1e6:>8.1f}{result.seconds * 1e6:>8.1f}"
        f"{ideal / result.seconds:>9.0%}{baseline.seconds / result.seconds:>7.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
