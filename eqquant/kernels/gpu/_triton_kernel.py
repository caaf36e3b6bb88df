"""The Triton kernel: decode subtiles of the weight in registers, and multiply.

A subtile has some bytes of some rows. A step decodes several subtiles and multiplies
each by tensor cores. The weight is not scaled:

- `x @ w.T`: the product with a block is multiplied by a scale per row, in float32. If a
    subtile spans several blocks, it is multiplied once per block, by an activation that
    is zero in the other blocks. For many rows (`Tiles.scaled`) scales multiply the
    weight in 16 bits instead, because there are fewer weights than products.
- `x @ w`: the scales of rows multiply the activation, in float32, before it is rounded
    or split.

The activation is loaded in plane order, so no other kernel has to permute, cast or pad
it. Only for codes with a history, whose planes are single columns, XLA permutes it. If
there are too few tiles for the chip, each program sums a part of the contracted axis,
and XLA adds the parts.
"""

import dataclasses
import functools as ft
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ._ptx import multiply_add
from ._triton_plan import iota, TritonPlan


@dataclasses.dataclass(frozen=True)
class _Program:
    """The references and indices of a program.

    - `part`: the part of the contracted axis that it sums.
    - `index`: the index in the batch.
    - `codes_index`, `scales_index`: the positions of the matrix among codes and scales.
    - `start`: the first row of the weight, or byte of a row, of its tile.
    - `m`: the rows of the activation in its tile.
    - `ready`: a zero that depends on the lookup table.
    - `positions`: references of `TritonPlan.positions`.
    - `table`: the reference of the table of codes with a history, in interpret mode.
    """

    x: Any
    codes: Any
    scales: Any
    out: Any
    part: Any
    index: Any
    codes_index: Any
    scales_index: Any
    start: Any
    m: Any
    ready: Any
    positions: list
    table: list


def kernel(
    plan: TritonPlan, stacked: tuple[bool, bool], x, codes, scales, *refs
) -> None:
    """Compute a tile. `stacked` is whether codes and scales are stacks, in which an
    operand has the positions of matrices. The last operands are `plan.positions`, and
    the table of codes with a history."""
    *x_scales, out = refs
    table = [x_scales.pop()] if plan.product.format.history else []
    positions = [x_scales.pop() for _ in plan.positions][::-1]
    tile, part, index = (pl.program_id(i) for i in range(3))
    start_m = lax.rem(tile, jnp.int32(plan.num_m)) * plan.tiles.m
    start = lax.div(tile, jnp.int32(plan.num_m)) * plan.tile_size
    ready = 0
    if plan.decoder is not None:
        ready = plan.decoder.prepare(32 * plan.tiles.warps, *table)
    m = start_m + iota(plan.tiles.m)
    position = index
    if any(stacked):
        *x_scales, indices = x_scales
        position = indices[index]
    of_codes, of_scales = (position if is_stack else index for is_stack in stacked)
    program = _Program(
        x,
        codes,
        scales,
        out,
        part,
        index,
        of_codes,
        of_scales,
        start,
        m,
        ready,
        positions,
        table if plan.interpret else [],
    )
    if plan.product.contract_rows:
        _contract_rows(plan, program)
    else:
        _contract_columns(plan, program, x_scales)


#
# `x @ w.T`
#


def _contract_columns(plan: TritonPlan, program: _Program, x_scales: list) -> None:
    total = jnp.zeros((plan.tiles.rows, plan.tiles.m), plan.sum_dtype)
    step = ft.partial(_columns_step, plan, program)
    total = lax.fori_loop(0, plan.steps, step, total)
    total = total.astype(jnp.float32) * plan.scale
    row = program.start + iota(plan.tiles.rows)
    if not plan.blocked:
        scale = _load_scale(
            program.scales, program.scales_index, row, plan.product.rows
        )
        scale = scale.astype(jnp.float32)
        total = total * lax.broadcast_in_dim(scale, total.shape, (0,))
    for ref in x_scales:
        scale = _load_scale(ref, program.index, program.m, plan.product.m)
        total = total * lax.broadcast_in_dim(scale, total.shape, (1,))
    column, m = _grid(row, program.m)
    _store(plan, program, total, m, column)


def _columns_step(plan: TritonPlan, program: _Program, i, total):
    """Add the products with the subtiles of step `i`."""
    row = program.start + iota(plan.tiles.rows)
    for subtile in range(plan.tiles.subtiles):
        first = (program.part * plan.steps + i) * plan.tiles.step_bytes
        byte = first + subtile * plan.tiles.bytes
        codes, scales = _load_subtile(plan, program, row, byte)
        weight_scale = None
        if plan.tiles.scaled and plan.blocked:
            (weight_scale,) = scales
            weight_scale = weight_scale.astype(plan.operand)
            if plan.subtile_blocks > 1:
                shape = *weight_scale.shape, plan.block_bytes
                weight_scale = lax.broadcast_in_dim(weight_scale, shape, (0, 1))
                weight_scale = weight_scale.reshape(codes[0].shape)
            else:
                shape = codes[0].shape
                weight_scale = lax.broadcast_in_dim(weight_scale, shape, (0,))
        # A product that is scaled needs accumulators of its own.
        separate = plan.blocked and weight_scale is None
        products: list = [None if separate else total for _ in scales]
        for plane in range(plan.planes):
            xs = _load_columns(plan, program, byte, plane)
            ws = _decode(plan, codes, plane, weight_scale)
            products = [
                _multiply(plan, x, ws, True, product)
                for x, product in zip(xs, products, strict=True)
            ]
        for scale, product in zip(scales, products, strict=True):
            if separate:
                scale = lax.broadcast_in_dim(scale, product.shape, (0,))
                product = multiply_add(product, scale, total, plan.interpret)
            total = product
    return total


def _load_columns(plan: TritonPlan, program: _Program, byte, plane: int) -> list:
    """Load the activation for a plane of a subtile: once per block, with zeros in place
    of the other blocks."""
    column, is_column = plan.x_columns_of(byte, plane)
    row, column = _grid(program.m, column)
    in_bounds, m = None, plan.product.m
    if m % plan.tiles.m or not plan.whole:
        is_column = lax.broadcast_in_dim(is_column, row.shape, (1,))
        in_bounds = (row < m) & is_column
    loaded = []
    copies = 1 if plan.tiles.scaled else plan.subtile_blocks
    for block in range(copies):
        mask = in_bounds
        if copies > 1:
            block_of = lax.div(iota(plan.tiles.bytes), jnp.int32(plan.block_bytes))
            mask = lax.broadcast_in_dim(block_of == block, row.shape, (1,))
            mask = mask if in_bounds is None else in_bounds & mask
        x = _load(program.x, program.index, row, column, mask)
        loaded.append(_split(plan, x))
    return loaded


#
# `x @ w`
#


def _contract_rows(plan: TritonPlan, program: _Program) -> None:
    zero = jnp.zeros((plan.tiles.m, plan.tiles.bytes), jnp.float32)
    totals = (zero,) * (plan.planes * plan.tiles.subtiles)
    step = ft.partial(_rows_step, plan, program)
    totals = lax.fori_loop(0, plan.steps, step, totals)
    for i, total in enumerate(totals):
        subtile, plane = divmod(i, plan.planes)
        byte = program.start + subtile * plan.tiles.bytes
        column = plan.columns_of(byte, plane)
        total = total * plan.scale
        _store(plan, program, total, *_grid(program.m, column))


def _rows_step(plan: TritonPlan, program: _Program, i, totals):
    """Add the products with the subtiles of step `i`."""
    row = (program.part * plan.steps + i) * plan.tiles.rows + iota(plan.tiles.rows)
    m, column = _grid(program.m, row)
    mask = None
    if not plan.whole or plan.product.m % plan.tiles.m:
        mask = (m < plan.product.m) & (column < plan.product.rows)
    x = _load(program.x, program.index, m, column, mask).astype(jnp.float32)
    xs = []
    if not plan.blocked:
        scale = _load_scale(
            program.scales, program.scales_index, row, plan.product.rows
        )
        xs = _split(plan, _scale_columns(x, scale, mask))
    products = []
    for subtile in range(plan.tiles.subtiles):
        byte = program.start + subtile * plan.tiles.bytes
        codes, (scale,) = _load_subtile(plan, program, row, byte)
        if plan.blocked:
            xs = _split(plan, _scale_columns(x, scale, mask))
        for plane in range(plan.planes):
            ws = _decode(plan, codes, plane)
            products.append(_multiply(plan, xs, ws, False))
    return tuple(a + b for a, b in zip(totals, products, strict=True))


def _scale_columns(x, scale, mask):
    x = x * lax.broadcast_in_dim(scale.astype(jnp.float32), x.shape, (1,))
    return x if mask is None else jnp.where(mask, x, 0)


#
# Both directions
#


def _grid(row, column):
    """Return row and column indices of a matrix."""
    shape = row.size, column.size
    return (
        lax.broadcast_in_dim(row, shape, (0,)),
        lax.broadcast_in_dim(column, shape, (1,)),
    )


def _load(ref, index, row, column, mask=None):
    """Load `ref[index, row, column]`, or zeros where the mask is false."""
    other = None if mask is None else jnp.zeros((), ref.dtype)
    return plgpu.load(ref.at[index, row, column], mask=mask, other=other)


def _load_scale(ref, index, row, rows: int):
    """Load the first scale of each row. Out-of-bounds rows repeat the last one."""
    row = jnp.minimum(row, rows - 1)
    return plgpu.load(ref.at[index, row, jnp.zeros_like(row)])


def _load_subtile(plan: TritonPlan, program: _Program, row, byte) -> tuple[list, list]:
    """Load the codes of a subtile, as [`Decoder`][] accepts them, and the scales of
    each of its blocks.

    Out-of-bounds rows repeat the last row, and out-of-bounds bytes are zero. The mask
    is the same for adjacent bytes, so that one load can read several.
    """
    row = row + program.ready
    product = plan.product
    if product.rows % plan.tiles.rows or not plan.whole:
        row = jnp.minimum(row, product.rows - 1)
    r, i = _grid(row, byte + iota(plan.tiles.bytes))
    mask = None
    if plan.row_bytes % plan.tiles.step_bytes or not plan.whole:
        mask = i < plan.row_bytes
    codes = []
    for column, is_code in plan.codes_of(byte):
        column = lax.broadcast_in_dim(column, r.shape, (1,))
        loaded = mask
        if is_code is not None:
            is_code = lax.broadcast_in_dim(is_code, r.shape, (1,))
            loaded = is_code if mask is None else mask & is_code
        codes.append(_load(program.codes, program.codes_index, r, column, loaded))
    for positions in program.positions:
        position = plgpu.load(positions.at[plan.positions_at(byte)])
        codes.append(lax.broadcast_in_dim(position, r.shape, (1,)))
    codes += [table[...] for table in program.table]
    if not plan.blocked:
        return codes, [None]
    scales = []
    if plan.tiles.scaled and plan.subtile_blocks > 1:
        block = lax.div(byte, jnp.int32(plan.block_bytes)) + iota(plan.subtile_blocks)
        block = jnp.minimum(block, product.blocks - 1)
        r, b = _grid(row, block)
        return codes, [_load(program.scales, program.scales_index, r, b)]
    for i in range(plan.subtile_blocks):
        block = lax.div(byte, jnp.int32(plan.block_bytes)) + i
        block = jnp.minimum(block, product.blocks - 1)
        block = lax.broadcast(block, (plan.tiles.rows,))
        scale = plgpu.load(program.scales.at[program.scales_index, row, block])
        scales.append(scale.astype(jnp.float32))
    return codes, scales


def _decode(plan: TritonPlan, codes: list, plane: int, scale=None) -> list:
    """Return the operands whose sum is a plane of the weight."""
    return codes if plan.decoder is None else plan.decoder(codes, plane, scale)


def _split(plan: TritonPlan, x) -> list:
    """Return the operands whose sum is the activation, the largest first."""
    high = x.astype(plan.operand)
    if plan.parts[0] == 1:
        return [high]
    rest = x - high.astype(jnp.float32)
    finite = jnp.abs(x) < jnp.inf
    return [high, jnp.where(finite, rest, 0).astype(plan.operand)]


def _multiply(
    plan: TritonPlan, xs: list, ws: list, transposed: bool, total: Any = None
):
    """Add the product of two sums to `total`, without the product of the smallest
    operands. The result is transposed if `transposed`."""
    for i, w in enumerate(ws):
        for x in xs if i == 0 else xs[:1]:
            a, b = (w, x) if transposed else (x, w)
            contracted = (1,), (1 if transposed else 0,)
            out = lax.dot_general(
                a, b, (contracted, ((), ())), preferred_element_type=plan.sum_dtype
            )
            total = out if total is None else total + out
    return total


def _store(plan: TritonPlan, program: _Program, value, row, column) -> None:
    mask = (row < plan.product.m) & (column < plan.product.free)
    index = program.part * plan.batch + program.index
    out = program.out.at[index, row, column]
    plgpu.store(out, value.astype(program.out.dtype), mask=mask)
