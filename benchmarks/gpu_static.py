"""What products with quantized weights cost on a GPU, without one.

    python benchmarks/gpu_static.py
    python benchmarks/gpu_static.py --chip a100 --m 1 --sizes 4096x4096 --markdown
    python benchmarks/gpu_static.py --products kernel --chip h100 h200 a100
    python benchmarks/gpu_static.py --encode --dtype float32

Needs the compiler: `pip install 'eqquant[gpu-compiler]'`, and `JAX_PLATFORMS=cpu`.
Nothing is run. For each product, by XLA's lowering for every platform ("loop"), by that
for GPUs ("XLA"), by the kernel ("kernel"), and dequantizing first ("dense first"):

- kernels that are started, those in loops as often as these turn;
- megabytes that they read and write, and how many times that is what has to be moved at
  least (codes, scales, activation, result, once each);
- the memory that the program needs meanwhile;
- for the kernel, and for one of XLA's without a loop, instructions for each weight,
  those of the arithmetic unit, and bytes of shared memory; what share of the bandwidth
  of the memory it can use at most for what has to be moved, and which unit limits it;
- KiB of codes that a core waits for at once. To keep the memory busy, an H100 needs
  some 20, an H200 some 30;
- how fast it is beside a product of cuBLAS in bfloat16, if that reaches what NVIDIA's
  data sheet says: at worst, and at best.

On a GPU, XLA tries several tilings for a product, and the kernels of cuBLAS, and keeps
the fastest; without one it takes its first. So its products are taken for those of
cuBLAS. They wait for what is decoded before, and that is all: nothing comes from a
cache, and between two kernels are two microseconds. Of INT8 codes, which the product
itself may convert, the worst is that a kernel of its own converts them. Of the kernel
of Triton, for many rows on Ampere and Ada, the schedulers of a core are run
(`_gpu_schedule.py`), and cores that have most of its tiles are waited for. Elsewhere
the worst is that tensor cores wait for all that is decoded, the best that they never
wait. That of cuBLAS is an ideal, too, and in truth both are slower.
"""

import argparse
import functools as ft
from typing import Any

import _gpu_encoding
import eqquant
import jax
import jax.numpy as jnp
from _gpu_bytes import cost, steps
from _gpu_schedule import can_schedule, seconds
from _gpu_times import by_kernel, by_pipeline, by_schedule, dense, of_xla
from _gpu_units import bound, in_flight, launched, pipelined, units_of
from eqquant._jax import gpus
from eqquant.debug import compile_for_gpu
from eqquant.kernels import gpu, xla
from eqquant.kernels.gpu import _chips, _choose, _pipeline
from eqquant.primitives import dot_by


FORMATS = {
    "int8": eqquant.Int8(),
    "w8a8": eqquant.Int8(activations="int8"),
    "nf4": eqquant.NF4(),
    "ternary": eqquant.Ternary(),
    "binary": eqquant.Binary(),
    "int4": eqquant.Int4(),
}


def params_of(q, dtype, contract_rows):
    return dict(
        format=q.format,
        contract_rows=contract_rows,
        precision=q.format.precision,
        weight_dtype=q.dtype,
        out_dtype=dtype,
    )


def by(kernel):
    def product(x, q, contract_rows):
        params = params_of(q, x.dtype, contract_rows)
        return dot_by(kernel)(x, q.codes, q.scales, **params)

    return product


PRODUCTS = {
    "loop": by(xla),
    "XLA": by(gpu.portable),
    "kernel": by(gpu),
    "dense first": lambda x, q, rows: (
        x @ (q.dequantize() if rows else q.dequantize().T)
    ),
}


def is_ours(kernel) -> bool:
    return kernel.name.endswith(("_columns", "_rows"))


def is_mosaic(kernel) -> bool:
    return kernel.name.endswith("_mosaic_gpu_kernel")


def tiles_of(x, q, contract_rows, chip) -> tuple[Any, float]:
    """Of our kernel; and how many weights a thread of Triton's has in its loop."""
    known = _chips.known(chip.name)
    assert known is not None
    params = params_of(q, x.dtype, contract_rows)
    del params["out_dtype"]
    if q.format.activations == "int8":
        x = jax.ShapeDtypeStruct(x.shape, jnp.int8)
    chosen = _choose.kernel_on(known, x, q.codes, q.scales, **params)
    assert isinstance(chosen, _choose.Kernel)
    tiles = chosen.tiles
    if isinstance(tiles, _pipeline.Pipeline):
        return tiles, 0.0
    count = tiles.rows * tiles.bytes * tiles.subtiles * 8 / q.format.bits
    return tiles, count / (32 * tiles.warps)


def steps_of(tiles, q, contract_rows) -> int:
    """Of the loop of a program of Triton's."""
    rows, packed = q.codes.shape
    if contract_rows:
        return -(-rows // (tiles.rows * tiles.split))
    return -(-packed // (tiles.bytes * tiles.subtiles * tiles.split))


def pipelined_in(kernel, tiles, q):
    integers = q.format.activations == "int8"
    itemsize = 1 if integers else 2
    brought = _pipeline.bytes_of_step(tiles, q.format, q.scales.shape[-1], itemsize)
    return pipelined(kernel, tiles, brought, integers)


def beside_cublas(program, x, q, contract_rows, chip) -> str:
    """How many times as fast, at worst and at best."""
    (m, size), weights = x.shape, q.size
    worst = best = 0.0
    for step in steps(program.as_text()):
        if "mpmd_map" in step.name:
            (kernel,) = filter(is_mosaic, program.kernels)
            tiles, _ = tiles_of(x, q, contract_rows, chip)
            found = pipelined_in(kernel, tiles, q)
            shape = m, size, weights // size
            integers = q.format.activations == "int8"
            times = by_pipeline(step, found, tiles, *shape, integers, chip)
        elif "pallas_call" in step.name:
            (kernel,) = filter(is_ours, program.kernels)
            tiles, each = tiles_of(x, q, contract_rows, chip)
            products = -(-m // tiles.m) * tiles.m * float(weights)
            integers = q.format.activations == "int8"
            if m > 128 and can_schedule(chip):
                launch = launched(program, kernel.name)
                assert launch is not None
                turns = steps_of(tiles, q, contract_rows)
                busy = seconds(kernel, tiles.warps, launch[2], turns, launch[0], chip)
                times = by_schedule(step, busy, chip)
            else:
                units = units_of(kernel, each)
                times = by_kernel(step, units, tiles.m, products, integers, chip)
        else:
            times = of_xla(step, chip)
        worst, best = worst + times[0], best + times[1]
    ideal = dense(m, size, weights // size, chip)
    worst, best = f"{ideal / worst:.2f}", f"{ideal / best:.2f}"
    return worst if worst == best else f"{worst}-{best}"


def limits(
    program, x, q, contract_rows, chip, weights, stored, needed: float
) -> list[str]:
    """Of the kernel that multiplies. Of the bytes that the program moves this share is
    needed."""
    found = []
    for kernel in program.kernels:
        if is_mosaic(kernel):
            tiles, _ = tiles_of(x, q, contract_rows, chip)
            units = pipelined_in(kernel, tiles, q).step
            numbers = units.issued, units.alu, units.shared
            cells = [*(f"{x:.1f}" for x in numbers), "", "", ""]
            return [*cells, str(kernel.spilled)]
        launch, waits, count = launched(program, kernel.name), "", None
        if launch and not kernel.loops:  # XLA's.
            count = weights / (launch[0] * launch[1])
        if is_ours(kernel):
            assert launch is not None
            tiles, count = tiles_of(x, q, contract_rows, chip)
            count /= -(-x.shape[0] // tiles.m)
            waits = f"{in_flight(kernel, tiles, chip, launch[0], launch[2]):.0f}"
        if count:
            units = units_of(kernel, count)
            share, limit = bound(units, chip, stored / weights)
            if needed < share:
                share, limit = needed, "memory"
            numbers = units.issued, units.alu, units.shared
            cells = [f"{x:.1f}" for x in numbers]
            cells += [f"{share:.0%}", limit, waits, str(kernel.spilled)]
            found.append((units.issued, cells))
    return max(found)[1] if found else [""] * 7


HEAD = "chip", "K x N", "M", "format", "product", "kernels", "MB", "x least", "MiB held"
HEAD = *HEAD, "instr./w.", "ALU/w.", "shared B/w.", "of bandwidth", "limit", "KiB"
HEAD = *HEAD, "spilled", "of cuBLAS"
WIDTHS = 8, 12, 5, 8, 12, 8, 9, 8, 9, 9, 7, 11, 12, 7, 4, 7, 9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chip", default=["h100"], choices=gpus, nargs="+")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 16, 2048])
    parser.add_argument("--sizes", nargs="+", default=["4096x14336"], help="KxN")
    usual = list(FORMATS)[:-1]
    parser.add_argument("--formats", nargs="+", default=usual, choices=FORMATS)
    parser.add_argument("--products", nargs="+", default=list(PRODUCTS))
    parser.add_argument("--encode", action="store_true", help="quantizing instead")
    parser.add_argument("--rows", action="store_true", help="x @ w, not x @ w.T")
    parser.add_argument("--dtype", default="bfloat16", help="of x, and of the result")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    line = "| {} |" if options.markdown else "{}"
    join = " | ".join if options.markdown else "  ".join
    head, widths = HEAD, WIDTHS
    if options.encode:
        head, widths = _gpu_encoding.HEAD, _gpu_encoding.WIDTHS
    show = lambda cells: print(
        line.format(join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))),
        flush=True,
    )
    show(head)
    if options.markdown:
        show(["---"] * len(head))
    for chip in options.chip if options.encode else []:
        for size in options.sizes:
            for name in options.formats:
                of = FORMATS[name], name, size, options.dtype, chip
                show(_gpu_encoding.row(*of))
    for chip in options.chip if not options.encode else []:
        for size in options.sizes:
            for m in options.m:
                for name in options.formats:
                    for product in options.products:
                        cells = row(options, chip, size, m, name, product)
                        show([chip, size, m, name, product, *cells])


def row(options, chip: str, size: str, m: int, name: str, product: str) -> list:
    k, n = map(int, size.split("x"))
    q = jax.eval_shape(
        ft.partial(eqquant.quantize, format=FORMATS[name], check_finite=False),
        jax.ShapeDtypeStruct((n, k), options.dtype),
    )
    x = jax.ShapeDtypeStruct((m, n if options.rows else k), jnp.dtype(options.dtype))
    stored = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(q))
    least = stored + x.dtype.itemsize * m * (k + n)
    multiply = ft.partial(PRODUCTS[product], contract_rows=options.rows)
    if product == "dense first":
        multiply = ft.partial(PRODUCTS[product], rows=options.rows)
    program = compile_for_gpu(multiply, x, q, chip=chip)
    total = cost(program.as_text())
    memory = program.compiled.memory_analysis()
    assert memory is not None
    held = memory.temp_size_in_bytes
    return [
        total.launches,
        f"{total.bytes / 1e6:.1f}",
        f"{total.bytes / least:.1f}",
        f"{held / 2**20:.1f}",
        *limits(
            program, x, q, options.rows, gpus[chip], n * k, stored, least / total.bytes
        ),
        beside_cublas(program, x, q, options.rows, gpus[chip]),
    ]


if __name__ == "__main__":
    main()
