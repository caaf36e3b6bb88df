"""The kernel for at most 32 rows of the activation, which is bound by memory bandwidth.

The weight enters the matrix unit as bytes (`_weights.py`) and is not scaled. Scales
multiply the product instead, one row of scales per block. The activation is spread for
this: it has one copy per block of a chunk, which is zero in all other blocks.
"""

import functools as ft

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int8, Int32, Shaped

from .._product import Product
from ._arrange import is_simple
from ._call import call
from ._chips import Chip, chip, Kind
from ._decode_plan import blocks_in_register, DecodePlan
from ._loop import loop, part_of
from ._operands import padded_shape
from ._spread import interleave, spread, transpose_codes
from ._tiles import lanes, pad_to, planes_of, result_like
from ._two_parts import read, stored_bytes
from ._weights import can_become


def fits(product: Product, chip: Chip) -> bool:
    """Return whether this kernel supports a product `x @ w.T`."""
    kinds: tuple[Kind, ...] = ("int8", "float8")
    format, m, columns = product.format, product.m, product.columns
    if m > 32 or not any(can_become(kind, format, chip) for kind in kinds):
        return False
    if not is_simple(format) or blocks_in_register(format) > 8:
        return False
    spread = 2 * blocks_in_register(format) * m * columns
    return spread <= 2**21 and columns // planes_of(format) * lanes <= 2**21


def dot(
    product: Product,
    x: Float[Array, "batch m columns"] | Int8[Array, "batch m columns"],
    codes: Shaped[Array, "stack rows packed"],
    scales: Float[Array, "some rows blocks"],
    index: Int32[Array, " batch"] | None = None,
    *,
    out_dtype,
    exact: bool,
    exact_table: bool,
    interpret: bool,
    stacked: bool = False,
) -> Float[Array, "batch m rows"]:
    """Compute a product, in `out_dtype`.

    The activation keeps 15 bits per entry if `exact`, otherwise 7. The entries of a
    codebook keep 15 bits if `exact_table`, otherwise 7. With an index, codes are a
    stack, and scales as well if `stacked`.
    """
    batch, m, _ = x.shape
    for axis, size in enumerate(padded_shape(product), 1):
        x = pad_to(x, axis, size)
    here = chip(product.compute.tpu)
    plan = DecodePlan.make(product, here, exact, exact_table, interpret)
    out = call(
        ft.partial(_kernel, plan),
        index,
        (False, True, stacked),
        grid=(batch, plan.cores, pl.cdiv(plan.steps, plan.cores)),
        in_specs=plan.in_specs,
        out_specs=plan.out_specs,
        out_shape=result_like(x, plan.m, product.rows, out_dtype),
        scratch_shapes=plan.scratch_shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "parallel", "arbitrary"),
            vmem_limit_bytes=plan.memory,
        ),
        interpret=interpret,
        name=f"{product.format.name}_decode",
    )(x, codes, scales if plan.scales_by_row else jnp.swapaxes(scales, 1, 2))
    return out[:, :m]


def _kernel(plan: DecodePlan, x, codes, scales, out, spread_x, x_scale, *scratch):
    decode = plan.decode
    tables, transposed_scales = scratch[: decode.num_tables], scales.at[0]
    x_sum = scratch[decode.num_tables] if decode.offset else None
    if plan.scales_by_row:
        transposed_scales = scratch[-1]
        _transpose(scales.at[0], transposed_scales)

    @pl.when(pl.program_id(2) == 0)
    def _():  # On each core, while the next tiles are prefetched.
        for ref, table in zip(tables, decode.tables(), strict=True):
            ref[...] = table
        spread(plan, x.at[0], spread_x, x_scale, x_sum)

    tables = [table[...] for table in tables]
    shape, dtype = (plan.m, plan.tile_rows), jnp.float32
    sums = [jnp.zeros(shape, dtype)]
    if not plan.blocked:
        shape = plan.spread_rows, plan.tile_rows // plan.joined
        sums = [jnp.zeros(shape, plan.product_dtype)] * plan.num_products
    add = ft.partial(_add_chunks, plan, spread_x, codes, transposed_scales, tables)
    sums = loop(plan.iterations, add, sums, bundles=plan.bundles)
    if plan.iterations * plan.chunks * plan.chunk < plan.size:
        sums = add(plan.iterations, sums)
    total = sums[0]
    if not plan.blocked:
        total = _unblocked_total(plan, sums, x_sum)
        total = total * transposed_scales[...].astype(jnp.float32)
    out[0] = (total * (x_scale[:, :1] * decode.scale)).astype(out.dtype)


def _add_chunks(
    plan: DecodePlan, x, codes, scales, tables: list, i, sums: list
) -> list:
    """Add the products of the chunks of iteration `i` to `sums`."""
    stored = stored_bytes(plan.chunks * plan.chunk, plan.format)
    codes = part_of(codes.at[0], 1, i, stored)
    x = part_of(x, 1, i, plan.chunks * plan.span)
    count = x.shape[1] // plan.span
    # Indices of a chunk overlap with lookups of the previous chunk only in this order:
    # the compiler moves instructions a short distance.
    ahead = 1 if plan.format.history else 0
    ready = [_prepare_chunk(plan, codes, j) for j in range(min(ahead, count))]
    for j in range(count):
        if j + ahead < count:
            ready.append(_prepare_chunk(plan, codes, j + ahead))
        products = _multiply_chunk(plan, x, ready.pop(0), tables, j)
        if not plan.blocked:
            sums = list(map(jnp.add, sums, products))
            continue
        chunk_scales = part_of(scales, 0, i, plan.chunks * plan.copies)
        if plan.operands.kind == "float8":
            # All digits have the same base, so they can be added before their rows.
            products = [plan.decode.combine(products)]
        first = j * plan.copies
        for block in range(min(plan.copies, chunk_scales.shape[0] - first)):
            rows = [_rows_of_copy(plan, product, block) for product in products]
            value, row = plan.decode.combine(rows), first + block
            scale = chunk_scales[row : row + 1, :].astype(jnp.float32)
            sums = [sums[0] + value * scale]
    return sums


def _prepare_chunk(plan: DecodePlan, codes, j: int):
    """Read chunk `j` and prepare it for the decoder."""
    transposed = plan.operands.transposed
    part = read(codes, j * plan.chunk, plan.chunk, plan.format)
    part = transpose_codes(part, transposed) if transposed else part
    return plan.decode.prepare(part, 0 if transposed else 1)


def _multiply_chunk(plan: DecodePlan, x, prepared, tables: list, j: int) -> list:
    """Return the products of chunk `j` with each digit of the weight."""
    axis = 0 if plan.operands.transposed else 1
    products = []
    for digit in zip(*plan.decode(prepared, tables), strict=True):
        some_x = x[:, j * plan.span : (j + 1) * plan.span]
        w = digit[0]
        if len(digit) > 1:
            w = jnp.concatenate(digit, axis)
        if jnp.issubdtype(w.dtype, jnp.integer):  # bfloat16 holds every int8.
            w = w.astype(x.dtype)
        product = lax.dot_general(
            some_x,
            w,
            (((1,), (axis,)), ((), ())),
            preferred_element_type=plan.product_dtype,
        )
        products.append(product)
    return products


def _rows_of_copy(plan: DecodePlan, product, copy: int) -> Float[Array, "m rows"]:
    """Return the rows of a product that belong to a copy of the activation, after
    adding the digits of the activation."""
    digits, m = plan.operands.digits, plan.m
    first = copy * digits.count * m
    total, *rest = (
        product[first + i * m :][:m].astype(jnp.float32) for i in range(digits.count)
    )
    for low in rest:
        total = (total * digits.base if digits.base > 1 else total) + low
    return total


def _unblocked_total(plan: DecodePlan, sums: list, x_sum) -> Float[Array, "m rows"]:
    """Return the unscaled result for a weight with one scale per row."""
    total = plan.decode.combine([_rows_of_copy(plan, p, 0) for p in sums])
    if plan.operands.transposed == 2:
        odd = plan.decode.combine([_rows_of_copy(plan, p, 1) for p in sums])
        total = interleave(total, odd)
    return total if x_sum is None else total + x_sum[:, :1] * plan.decode.offset


def _transpose(scales, out) -> None:
    """Transpose a matrix of whole registers, one column of registers at a time."""
    for start in range(0, scales.shape[1], lanes):
        part = slice(start, start + lanes)
        out[part, :] = scales[:, part].astype(jnp.float32).T
