"""Estimate the cost of quantized matmuls on an NVIDIA GPU, without a GPU.

    python benchmarks/static/gpu_roofline.py
    python benchmarks/static/gpu_roofline.py --chip a100 --m 1 --sizes 4096x4096
    python benchmarks/static/gpu_roofline.py --products kernel --chip h100 h200 a100
    python benchmarks/static/gpu_roofline.py --encode --dtype float32

Nothing runs: the script compiles each matmul and reads the program. It needs the
compiler (`pip install 'eqquant[gpu-compiler]'`) and `JAX_PLATFORMS=cpu`.

The column "product" names the lowering: XLA's lowering for every platform ("loop"),
XLA's lowering for GPUs ("XLA"), eqquant's kernel ("kernel"), or dequantizing and then
multiplying ("dense first"). The other columns:

- "kernels": kernel launches. A kernel in a loop counts once per iteration.
- "MB": megabytes that the kernels read and write. "x minimum" is the ratio to the
  minimum, which moves codes, scales, activation and result once each.
- "temp MiB": temporary memory of the program.
- "instr./w.", "ALU/w.", "shared B/w.": instructions, ALU instructions and bytes of
  shared memory per weight, for the kernel and for XLA kernels without a loop.
- "of bandwidth": the largest share of memory bandwidth that the program can use for the
  minimum bytes. "limit" names the unit that limits it.
- "KiB": codes in flight per core. To saturate memory, an H100 needs about 20 KiB, an
  H200 about 30.
- "spilled": registers that spill.
- "vs cuBLAS": the speed relative to a bfloat16 matmul by cuBLAS at the peak rate of
  NVIDIA's data sheet, from the longest to the shortest estimate.

On a GPU, XLA times several tilings and the kernels of cuBLAS, and keeps the fastest.
Without a GPU it takes its first candidate, so the model replaces XLA's matmuls with
cuBLAS matmuls. The model assumes that a matmul waits for the kernels that decode its
operands, that nothing hits a cache, and that two microseconds pass between kernels. XLA
can convert INT8 codes inside the matmul; the longest estimate adds a separate kernel.
For many rows on Ampere and Ada, `_gpu_schedule.py` simulates the schedulers of a core
for the Triton kernel, and the cores with the most tiles determine the time. Elsewhere,
tensor cores wait for all decoding in the longest estimate, and never wait in the
shortest. The cuBLAS time is ideal as well; real times of both are longer.
"""

import argparse
import functools as ft
import itertools
from collections.abc import Iterator
from typing import Any

import _gpu_encoding
import _paths  # noqa: F401
import eqquant
import jax
import jax.numpy as jnp
from _gpu_bytes import cost, steps
from _gpu_formats import DEFAULT, FORMATS
from _gpu_sass import loops_in
from _gpu_schedule import can_schedule, seconds
from _gpu_times import dense, kernel_time, pipelined_time, scheduled_time, xla_time
from _gpu_units import bound, in_flight, launched, pipelined, units_of
from _tables import add_output_options, format_row, output, print_head
from eqquant._jax import gpus
from eqquant.debug import compile_for_gpu
from eqquant.formats import num_codes
from eqquant.kernels import gpu, Matmul, xla
from eqquant.kernels.gpu import _chips, _choose, _pipeline, _triton
from eqquant.primitives import dot_by


def matmul_of(q, dtype, contract_rows) -> Matmul:
    return Matmul(q.format, contract_rows, q.compute, q.dtype, dtype)


def multiply_with(tiers):
    def product(x, q, contract_rows):
        matmul = matmul_of(q, x.dtype, contract_rows)
        return dot_by(tiers)(x, q.codes, q.scales, matmul=matmul)

    return product


PRODUCTS = {
    "loop": multiply_with((xla.KERNELS,)),
    "XLA": multiply_with((gpu.PORTABLE,)),
    "kernel": multiply_with((gpu.KERNELS, gpu.PORTABLE)),
    "dense first": lambda x, q, rows: (
        x @ (q.dequantize() if rows else q.dequantize().T)
    ),
}


def is_ours(kernel) -> bool:
    return kernel.name.endswith(("_columns", "_rows"))


def is_mosaic(kernel) -> bool:
    return kernel.name.endswith("_mosaic_gpu_kernel")


def tiles_of(x, q, contract_rows, chip) -> tuple[Any, float]:
    """Return the tiles of eqquant's kernel, and the weights per Triton thread and loop.

    The second result is 0 for the Mosaic kernel.
    """
    known = _chips.known(chip.name)
    assert known is not None
    product = matmul_of(q, x.dtype, contract_rows).of(x, q.codes, q.scales)
    chosen = _choose.kernel_on(known, product)
    assert isinstance(chosen, _choose.TensorCoreKernel)
    tiles = chosen.tiles
    if isinstance(tiles, _pipeline.Pipeline):
        return tiles, 0.0
    count = tiles.rows * tiles.bytes * tiles.subtiles * _triton.planes_in(q.format)
    return tiles, count / (32 * tiles.warps)


def steps_of(tiles, q, contract_rows) -> int:
    """Return the iterations of the loop of a Triton program."""
    rows, packed = q.codes.shape
    if contract_rows:
        return -(-rows // (tiles.rows * tiles.split))
    columns = num_codes(packed, q.format.bits)
    step = tiles.bytes * tiles.subtiles * _triton.planes_in(q.format)
    return -(-columns // (step * tiles.split))


def pipelined_in(kernel, tiles, q):
    integers = q.compute.activations == "int8"
    itemsize = 1 if integers else 2
    loaded = _pipeline.bytes_of_step(tiles, q.format, q.scales.shape[-1], itemsize)
    return pipelined(kernel, tiles, loaded, integers)


def versus_cublas(program, x, q, contract_rows, chip) -> str:
    """Format the speed relative to cuBLAS, for the longest and the shortest time."""
    (m, size), weights = x.shape, q.size
    worst = best = 0.0
    for step in steps(program.as_text()):
        if "mpmd_map" in step.name:
            (kernel,) = filter(is_mosaic, program.kernels)
            tiles, _ = tiles_of(x, q, contract_rows, chip)
            work = pipelined_in(kernel, tiles, q)
            shape = m, size, weights // size
            integers = q.compute.activations == "int8"
            times = pipelined_time(step, work, tiles, *shape, integers, chip)
        elif "pallas_call" in step.name:
            (kernel,) = filter(is_ours, program.kernels)
            tiles, weights_per_thread = tiles_of(x, q, contract_rows, chip)
            products = -(-m // tiles.m) * tiles.m * float(weights)
            integers = q.compute.activations == "int8"
            if m > 128 and can_schedule(chip):
                launch = launched(program, kernel.name)
                assert launch is not None
                turns = steps_of(tiles, q, contract_rows)
                busy = seconds(kernel, tiles.warps, launch[2], turns, launch[0], chip)
                times = scheduled_time(step, busy, chip)
            else:
                units = units_of(kernel, weights_per_thread)
                times = kernel_time(step, units, tiles.m, products, integers, chip)
        else:
            times = xla_time(step, chip)
        worst, best = worst + times[0], best + times[1]
    ideal = dense(m, size, weights // size, chip)
    worst, best = f"{ideal / worst:.2f}", f"{ideal / best:.2f}"
    return worst if worst == best else f"{worst}-{best}"


def limits(
    program, x, q, contract_rows, chip, weights, stored, needed: float
) -> list[str]:
    """Return the cells on instructions and limits of the kernel that multiplies.

    `needed` is the ratio of the minimum bytes to the bytes that the program moves.
    """
    found = []
    for kernel in program.kernels:
        if is_mosaic(kernel):
            tiles, _ = tiles_of(x, q, contract_rows, chip)
            units = pipelined_in(kernel, tiles, q).step
            numbers = units.issued, units.alu, units.shared
            cells = [*(f"{x:.1f}" for x in numbers), "", "", ""]
            return [*cells, str(kernel.spilled)]
        launch, waits, count = launched(program, kernel.name), "", None
        if launch and not loops_in(kernel):  # A kernel of XLA.
            count = weights / (launch[0] * launch[1])
        if is_ours(kernel):
            assert launch is not None
            tiles, count = tiles_of(x, q, contract_rows, chip)
            count /= -(-x.shape[0] // tiles.m)
            unit = _triton.unit_bytes(q.format)
            waits = in_flight(kernel, tiles, unit, chip, launch[0], launch[2])
            waits = f"{waits:.0f}"
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


HEAD = "chip", "K x N", "M", "format", "product", "kernels", "MB", "x minimum"
HEAD = *HEAD, "temp MiB", "instr./w.", "ALU/w.", "shared B/w.", "of bandwidth", "limit"
HEAD = *HEAD, "KiB", "spilled", "vs cuBLAS"
WIDTHS = 8, 12, 5, 8, 12, 8, 9, 9, 9, 9, 7, 11, 12, 7, 4, 7, 9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chip", default=["h100"], choices=gpus, nargs="+")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 16, 2048], help="rows")
    parser.add_argument("--sizes", nargs="+", default=["4096x14336"], help="KxN")
    parser.add_argument("--formats", nargs="+", default=DEFAULT, choices=FORMATS)
    parser.add_argument("--products", nargs="+", default=list(PRODUCTS))
    parser.add_argument("--encode", action="store_true", help="estimate quantization")
    parser.add_argument("--rows", action="store_true", help="x @ w instead of x @ w.T")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of x and the result")
    add_output_options(parser)
    options = parser.parse_args()
    head, widths, rows = HEAD, WIDTHS, product_rows
    if options.encode:
        head, widths = _gpu_encoding.HEAD, _gpu_encoding.WIDTHS
        rows = encoding_rows
    with output(options):
        print_head(head, widths, options.markdown)
        for cells in rows(options):
            print(format_row(cells, widths, options.markdown), flush=True)


def encoding_rows(options) -> Iterator[list]:
    for chip, size, name in itertools.product(
        options.chip, options.sizes, options.formats
    ):
        yield _gpu_encoding.row(FORMATS[name], name, size, options.dtype, chip)


def product_rows(options) -> Iterator[list]:
    for chip, size, m, name, product in itertools.product(
        options.chip, options.sizes, options.m, options.formats, options.products
    ):
        cells = row(options, chip, size, m, name, product)
        yield [chip, size, m, name, product, *cells]


def row(options, chip: str, size: str, m: int, name: str, product: str) -> list:
    k, n = map(int, size.split("x"))
    q = jax.eval_shape(
        ft.partial(eqquant.quantize, check_finite=False, **FORMATS[name]),
        jax.ShapeDtypeStruct((n, k), options.dtype),
    )
    x = jax.ShapeDtypeStruct((m, n if options.rows else k), jnp.dtype(options.dtype))
    stored = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(q))
    minimum = stored + x.dtype.itemsize * m * (k + n)
    multiply = ft.partial(PRODUCTS[product], contract_rows=options.rows)
    if product == "dense first":
        multiply = ft.partial(PRODUCTS[product], rows=options.rows)
    program = compile_for_gpu(multiply, x, q, chip=chip)
    total = cost(program.as_text())
    memory = program.compiled.memory_analysis()
    assert memory is not None
    needed = minimum / total.bytes
    return [
        total.launches,
        f"{total.bytes / 1e6:.1f}",
        f"{total.bytes / minimum:.1f}",
        f"{memory.temp_size_in_bytes / 2**20:.1f}",
        *limits(program, x, q, options.rows, gpus[chip], n * k, stored, needed),
        versus_cublas(program, x, q, options.rows, gpus[chip]),
    ]


if __name__ == "__main__":
    main()
