"""How close the kernels for TPUs come to the roofline, by the compiler's own schedule.

    python benchmarks/tpu_roofline.py
    python benchmarks/tpu_roofline.py --chips v5e --m 8 16 --size 4096 4096
    python benchmarks/tpu_roofline.py --sweep  # What `kernels/tpu/_chips.py` has.

Needs libtpu, but no TPU: the kernels are compiled ahead of time, and the time follows
from the schedule (see `_schedule.py`). That is a model, not a measurement: trust the
cycles and the ranking rather than the microseconds.

Cycles are of one grid step: of the instructions, of the matrix units, and of the
transfers from memory; the longest of the three decides. The roofline is the time to
move every byte once, or to multiply at the peak rate in bfloat16, whichever is longer.
"dense" is a Pallas kernel for bfloat16, compiled the same way. What is done to the
activation before, by a kernel or by XLA, counts in the time. "XLA" is what the compiler
makes of dequantizing first, in the cycles that it expects itself.
"""

import argparse
import dataclasses
import functools as ft
import itertools

import eqquant
import jax
import jax.numpy as jnp
from _schedule import CORES, estimate
from eqquant._dot import dot_by
from eqquant.debug import compile_for_tpu
from eqquant.kernels import tpu
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


FORMATS = {
    "int8": eqquant.Int8(),
    "w8a8": eqquant.Int8(activations="int8"),
    "nf4": eqquant.NF4(),
    "ternary": eqquant.Ternary(),
    "binary": eqquant.Binary(),
}


def dense(x, w):
    """`x @ w`, tile by tile."""
    (m, k), (_, n) = x.shape, w.shape
    bm, bn, bk = min(m, 2048), 512 if m <= 256 else 1024, k if m <= 256 else 1024

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
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--m", type=int, nargs="+", default=[8, 16, 256, 2048])
    parser.add_argument("--size", type=int, nargs=2, default=(4096, 14336))
    parser.add_argument("--sweep", action="store_true", help="steps for few rows")
    options = parser.parse_args()
    k, n = options.size
    if options.sweep:
        sweep(options.chips, options.formats, k, n)
        return

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
                q = quantized(name, n, k)
                for precision in ("high", "default")[: 1 + (name == "nf4")]:
                    product = ft.partial(multiply, format=q.format, precision=precision)
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
                result = estimate(
                    lambda x, q: x @ q.dequantize().T,
                    x,
                    q,
                    chip=chip,
                    compile=compile_for_tpu,
                )
                report(chip, core, m, k, n, name, "XLA", q.nbytes, result, baseline)


def quantized(name: str, n: int, k: int) -> eqquant.QuantizedArray:
    """The shapes of a weight."""
    return jax.eval_shape(
        lambda: eqquant.quantize(
            jnp.zeros((n, k), jnp.bfloat16), FORMATS[name], check_finite=False
        )
    )


def multiply(x, codes, scales, *, format, precision):
    return dot_by(tpu)(
        x,
        codes,
        scales,
        format=format,
        contract_rows=False,
        precision=precision,
        weight_dtype=jnp.bfloat16,
        out_dtype=jnp.bfloat16,
    )


def sweep(chips, formats, k: int, n: int) -> None:
    """For 8 rows: the time with steps of so many rows, and so many bytes at once."""
    chosen = tpu.chip
    x = jax.ShapeDtypeStruct((8, k), jnp.bfloat16)
    for chip in chips:
        for name in formats:
            q = quantized(name, n, k)
            product = ft.partial(multiply, format=q.format, precision="high")
            times = {}
            for step in itertools.product((256, 512, 1024), (128, 256, 512)):
                if q.block_size and step[1] > 128:
                    continue

                def changed(step=step, format=q.format):
                    usual = chosen()
                    steps = usual.steps | {format.name: step}
                    return dataclasses.replace(usual, steps=steps)

                tpu.chip = changed
                result = estimate(
                    product, x, q.codes, q.scales, chip=chip, compile=compile_for_tpu
                )
                times[step] = result.seconds * 1e6
            tpu.chip = chosen
            best = sorted(times, key=times.__getitem__)
            listed = ", ".join(f"{step}: {times[step]:.1f}" for step in best)
            print(f"{chip:<6} {name:<8} us by (rows, bytes): {listed}", flush=True)


def report(chip, core, m, k, n, name, precision, weight_bytes, result, baseline):
    moved = weight_bytes + 2 * m * (k + n)  # Bytes.
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
