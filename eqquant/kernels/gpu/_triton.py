"""The kernel: codes to the result of a product, by Pallas and Triton.

A step decodes a few subtiles of the weight in registers, and multiplies each with
tensor cores. What a subtile holds is some bytes of a row, for some rows. The weight is
not scaled:

- `x @ w.T`: products of a block share a scale for each row, which their sum is
  multiplied with, in float32. If a subtile spans several blocks, it is multiplied once
  for each, by an activation that is zero elsewhere. But of many rows (`Tiles.scaled`)
  the weight is scaled, in 16 bits, as if it were dense: fewer numbers of it than sums
  of its products;
- `x @ w`: the activation is multiplied with the scales of the rows, one for a subtile,
  in float32, before it is rounded, or split.

The activation is read where the codes of a plane want it, so nothing is permuted, cast
or padded by another kernel. If there are too few tiles for the chip, each program sums
a part of the contracted axis, and XLA adds these.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int8, Shaped

from ...formats import Format, num_codes, planes_of
from ._lookup import Decoder
from ._ptx import multiply_add


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a product is cut.

    - `m`: rows of the activation, of a program.
    - `rows`: of the weight, of a subtile.
    - `bytes`: of a row, of a subtile: part of a block, or, for `x @ w.T`, whole blocks.
    - `subtiles`: of a step, along a row.
    - `split`: programs that share a sum.
    - `scaled`: whether weights are scaled, in 16 bits, and not sums of a block.
    """

    m: int
    rows: int
    bytes: int
    subtiles: int
    split: int = 1
    warps: int = 4
    stages: int = 3
    scaled: bool = False


def subtile_bytes(format: Format, most: int) -> int:
    """How many bytes of a row one scale, and one slice of a plane, may have: a power of
    two, up to `most`; less than 16 if tensor cores cannot multiply so few."""
    if format.block_size is None:
        return most
    width = format.block_size * format.bits // 8
    return math.gcd(width, most)


def dot(
    x: Float[Array, "batch m size"] | Int8[Array, "batch m size"],
    codes: Shaped[Array, "batch rows packed"],
    scales: Float[Array, "batch rows blocks"],
    x_unit: Float[Array, "batch m 1"] | None = None,
    *,
    format: Format,
    contract_rows: bool,
    operand,
    parts: tuple[int, int],
    tiles: Tiles,
    out_dtype,
    interpret: bool = False,
) -> Float[Array, "batch m out"]:
    """`x @ w.T`, or `x @ w`; both operands become `parts` numbers of type `operand`.
    If that is int8, so are the activation, the rows of which are in `x_unit`, and the
    codes, and a row of the weight has one scale."""
    # Not every jaxlib has Triton, which is needed for a GPU alone.
    from jax.experimental.pallas import triton as plgpu

    batch, m, _ = x.shape
    _, rows, packed = codes.shape
    blocks = scales.shape[-1]
    planes = planes_of(format.bits)
    columns = num_codes(packed, format.bits)
    integers = jnp.dtype(operand) == jnp.int8
    assert not integers or not contract_rows
    sums = jnp.int32 if integers else jnp.float32
    decode = None
    if not integers:
        pairs = 2 if tiles.m > 64 and not contract_rows else 1
        decode = Decoder(format, operand, parts[1], interpret, pairs)
    unit_of_levels = 1.0 if decode is None else decode.unit
    wide = tiles.bytes * tiles.subtiles
    # Bytes of a plane of a group, and codes from one group to the next.
    run, stride = format.group // planes, format.group
    if planes == 1:
        run = stride = tiles.bytes
    block = packed // blocks if blocks > 1 else None
    # Blocks in a subtile.
    spanned = 1 if block is None else max(tiles.bytes // block, 1)
    assert spanned == 1 or not contract_rows

    contracted, step = (rows, tiles.rows) if contract_rows else (packed, wide)
    free, size = (packed, wide) if contract_rows else (rows, tiles.rows)
    steps = pl.cdiv(pl.cdiv(contracted, step), tiles.split)
    whole = steps * step * tiles.split == contracted
    num_m = pl.cdiv(m, tiles.m)
    out_size = columns if contract_rows else rows
    out_type = jnp.float32 if tiles.split > 1 else out_dtype

    def iota(size: int):
        return lax.broadcasted_iota(jnp.int32, (size,), 0)

    def load(ref, first, row, column, mask=None):
        """`ref[first, row, column]`, each of these in the shape of the others."""
        other = None if mask is None else jnp.zeros((), ref.dtype)
        return plgpu.load(ref.at[first, row, column], mask=mask, other=other)

    def grid_of(row, column):
        shape = row.size, column.size
        return (
            lax.broadcast_in_dim(row, shape, (0,)),
            lax.broadcast_in_dim(column, shape, (1,)),
        )

    def columns_of(start, plane: int):
        """Of the activation, or of the result: those of a plane of a subtile."""
        i = iota(tiles.bytes)
        within = start % run if run > tiles.bytes else 0
        first = lax.div(start, jnp.int32(run)) * stride + within + plane * run
        if run >= tiles.bytes:
            return first + i
        return first + lax.div(i, jnp.int32(run)) * stride + lax.rem(i, jnp.int32(run))

    def numbers_of(codes, plane: int, scale=None) -> list:
        return [codes] if decode is None else decode(codes, plane, scale)

    def split(x) -> list:
        """The activation as numbers of `operand`, the largest first."""
        high = x.astype(operand)
        if parts[0] == 1:
            return [high]
        rest = x - high.astype(jnp.float32)
        finite = jnp.abs(x) < jnp.inf
        return [high, jnp.where(finite, rest, 0).astype(operand)]

    def multiply(xs: list, ws: list, turned: bool, total: Any = None):
        """The product of two sums, but for that of what is smallest in both; added to
        a total by the tensor cores."""
        for i, w in enumerate(ws):
            for x in xs if i == 0 else xs[:1]:
                a, b = (w, x) if turned else (x, w)
                contracted = (1,), (1 if turned else 0,)
                out = lax.dot_general(
                    a,
                    b,
                    (contracted, ((), ())),
                    preferred_element_type=sums,
                )
                total = out if total is None else total + out
        return total

    def kernel(x, codes, scales, *refs):
        *unit, out = refs
        tile, part, first = (pl.program_id(i) for i in range(3))
        start_m = lax.rem(tile, jnp.int32(num_m)) * tiles.m
        start = lax.div(tile, jnp.int32(num_m)) * size
        ready = 0 if decode is None else decode.prepare(32 * tiles.warps)
        row_m = start_m + iota(tiles.m)

        def tile_of(row, byte) -> tuple[Any, list[Any]]:
            """Codes, and the scales of each of their blocks: beyond the last row that
            again, and beyond the last byte zeros, so that several bytes are still one
            load."""
            row = row + ready
            row = jnp.minimum(row, rows - 1) if rows % tiles.rows or not whole else row
            at = byte + iota(tiles.bytes)
            r, c = grid_of(row, at)
            beyond = packed % wide or not whole
            q = load(codes, first, r, c, c < packed if beyond else None)
            if blocks == 1:
                return q, [None]
            found = []
            for which in range(spanned):
                i = lax.div(byte, jnp.int32(block)) + which
                i = lax.broadcast(jnp.minimum(i, blocks - 1), (tiles.rows,))
                scale = plgpu.load(scales.at[first, row, i])
                found.append(scale.astype(jnp.float32))
            return q, found

        def columns_step(i, acc):
            row = start + iota(tiles.rows)
            for sub in range(tiles.subtiles):
                byte = (part * steps + i) * wide + sub * tiles.bytes
                q, each = tile_of(row, byte)
                by = None
                if tiles.scaled and blocks > 1:
                    by = lax.broadcast_in_dim(each[0].astype(operand), q.shape, (0,))
                # A sum that is scaled afterwards needs registers of its own.
                late = blocks > 1 and by is None
                totals: list = [None if late else acc for _ in each]
                for plane in range(planes):
                    r, c = grid_of(row_m, columns_of(byte, plane))
                    mask = None
                    if m % tiles.m or not whole:
                        mask = (r < m) & (c < columns)
                    some = []
                    for which in range(spanned):
                        ours = mask
                        if spanned > 1:  # Those of other blocks multiply zeros.
                            at = lax.div(iota(tiles.bytes), jnp.int32(block))
                            ours = lax.broadcast_in_dim(at == which, r.shape, (1,))
                            ours = ours if mask is None else mask & ours
                        some.append(split(load(x, first, r, c, ours)))
                    ws = numbers_of(q, plane, by)
                    totals = [
                        multiply(xs, ws, True, total)
                        for xs, total in zip(some, totals, strict=True)
                    ]
                for scale, total in zip(each, totals, strict=True):
                    if late:
                        scale = lax.broadcast_in_dim(scale, total.shape, (0,))
                        total = multiply_add(total, scale, acc, interpret)
                    acc = total
            return acc

        def rows_step(i, accs):
            row = (part * steps + i) * tiles.rows + iota(tiles.rows)
            r, c = grid_of(row_m, row)
            mask = None if whole and not m % tiles.m else (r < m) & (c < rows)
            some = load(x, first, r, c, mask).astype(jnp.float32)
            scaled = []
            if blocks == 1:
                at = jnp.minimum(row, rows - 1)
                scale = plgpu.load(scales.at[first, at, jnp.zeros_like(at)])
                scaled = split(scaled_by(some, scale, mask))
            out = []
            for sub in range(tiles.subtiles):
                q, (scale,) = tile_of(row, start + sub * tiles.bytes)
                xs = scaled if blocks == 1 else split(scaled_by(some, scale, mask))
                for plane in range(planes):
                    out.append(multiply(xs, numbers_of(q, plane), False))
            return tuple(a + b for a, b in zip(accs, out, strict=True))

        def scaled_by(x, scale, mask):
            x = x * lax.broadcast_in_dim(scale.astype(jnp.float32), x.shape, (1,))
            return x if mask is None else jnp.where(mask, x, 0)

        def store(value, row, column):
            mask = (row < m) & (column < out_size)
            at = out.at[part * batch + first, row, column]
            plgpu.store(at, value.astype(out.dtype), mask=mask)

        if contract_rows:
            shape = tiles.m, tiles.bytes
            zeros = (jnp.zeros(shape, jnp.float32),) * (planes * tiles.subtiles)
            accs = lax.fori_loop(0, steps, rows_step, zeros)
            for i, acc in enumerate(accs):
                sub, plane = divmod(i, planes)
                byte = start + sub * tiles.bytes
                column = columns_of(byte, plane)
                store(acc * unit_of_levels, *grid_of(row_m, column))
            return
        zero = jnp.zeros((tiles.rows, tiles.m), sums)
        acc = lax.fori_loop(0, steps, columns_step, zero)
        acc = acc.astype(jnp.float32) * unit_of_levels
        row = start + iota(tiles.rows)
        if blocks == 1:
            at = jnp.minimum(row, rows - 1)
            scale = plgpu.load(scales.at[first, at, jnp.zeros_like(at)])
            scale = scale.astype(jnp.float32)
            acc = acc * lax.broadcast_in_dim(scale, acc.shape, (0,))
        for ref in unit:
            at = jnp.minimum(row_m, m - 1)
            each = plgpu.load(ref.at[first, at, jnp.zeros_like(at)])
            acc = acc * lax.broadcast_in_dim(each, acc.shape, (1,))
        n, r = grid_of(row, row_m)
        store(acc, r, n)

    def like(x):
        """A result, which inside of shard_map varies as the activation does."""
        shape = tiles.split * batch, m, out_size
        return jnp.broadcast_to(x[:1, :1, :1].astype(out_type), shape)

    units = () if x_unit is None else (x_unit.astype(jnp.float32),)
    out = pl.pallas_call(
        kernel,
        grid=(num_m * pl.cdiv(free, size), tiles.split, batch),
        out_shape=jax.eval_shape(like, x),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiles.warps, num_stages=tiles.stages
        ),
        interpret=interpret,
        name=f"{format.name}_{'rows' if contract_rows else 'columns'}",
    )(x, codes, scales, *units)
    if tiles.split > 1:
        out = jnp.sum(out.reshape(tiles.split, batch, m, out_size), 0)
    return out.astype(out_dtype)
