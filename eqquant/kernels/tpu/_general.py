"""The kernel that takes any format, shape and direction.

A tile of the weight is decoded, scaled and rounded to what the matrix unit multiplies,
in vector memory: the best there is for many rows, as the decoding is then hidden behind
the products.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ...formats import Format
from ._chips import Chip
from ._tiles import from_tiles, lanes, pad_to, result_like, to_tiles


# Of a tile, about.
_columns = 1024


def fits(packed: int, rows: int, format: Format) -> bool:
    """Whether a tile of whole blocks is small enough."""
    return _tile_bytes(packed, format) * _tile_rows(rows) <= 2**21


def _tile_rows(rows: int) -> int:
    """Of a tile: all of them, or a whole number of registers."""
    return min(rows, 512)


def _tile_bytes(packed: int, format: Format) -> int:
    """Columns of a tile, packed: all of them, or whole registers and whole blocks."""
    block = (format.block_size or format.group) * format.bits // 8
    # Scales come in whole registers too: 8 rows of 32 bits, or 16 of 16 bits.
    whole = math.lcm(lanes, block * (16 if format.block_size else 1))
    size = math.ceil(_columns * format.bits // 8 / whole) * whole
    return packed if packed <= size else size


def _blocks(tile: int, packed: int, blocks: int, format: Format) -> int:
    """How many scales a row of a tile has."""
    if format.block_size is None or tile == packed:
        return blocks
    return tile * 8 // format.bits // format.block_size


def _tile_m(m: int, operand, most: int) -> int:
    """Rows of the activation of a tile: whole registers of them."""
    size = jnp.dtype(operand).itemsize
    register = 32 // size
    return min(math.ceil(m / register) * register, most * 2 // size)


def _decode(codes, scales, plane: int, format: Format) -> Float[Array, "rows bytes"]:
    """One plane of a tile, `scales` spread over it."""
    codes = codes.astype(jnp.int32)
    if format.bits < 8:
        codes = lax.shift_right_logical(codes, plane * format.bits)
        codes = codes & (2**format.bits - 1)
    levels = format.levels(codes, jnp.float32)
    return levels if scales is None else levels * scales


def _spread(
    scales: Float[Array, "blocks rows"], tile: int, format: Format
) -> Float[Array, "rows bytes"]:
    """The scales of a tile, one for each of its bytes."""
    assert format.block_size is not None
    block = format.block_size * format.bits // 8
    scales = scales.astype(jnp.float32).T
    rows, _ = scales.shape
    scales = pad_to(scales, 1, lanes)
    lane = lax.broadcasted_iota(jnp.int32, (rows, lanes), 1)
    parts = []
    for start in range(0, tile, lanes):
        first = start // block // lanes * lanes
        index = lax.div(lane + start, jnp.int32(block)) - first
        source = scales[:, first : first + lanes]
        parts.append(
            jnp.take_along_axis(source, index, axis=1, mode="promise_in_bounds")
        )
    return jnp.concatenate(parts, 1)[:, :tile] if len(parts) > 1 else parts[0][:, :tile]


def _masked(scales, axis: int, start: Int[Array, ""], size: int):
    """Zero in place of what lies beyond an axis."""
    index = start + lax.broadcasted_iota(jnp.int32, scales.shape, axis)
    return jnp.where(index < size, scales, jnp.zeros_like(scales))


def _multiply(x, w, contract: int):
    return lax.dot_general(
        x,
        w.astype(x.dtype),
        (((1,), (contract,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def contract_columns(
    x, codes, scales, *, format: Format, operand, chip: Chip, interpret: bool
):
    """`x @ w.T`"""
    batch, m, _ = x.shape
    _, rows, packed = codes.shape
    blocks = scales.shape[-1]
    planes = 8 // format.bits
    tile = _tile_bytes(packed, format)
    bn = _tile_rows(rows)
    bm = _tile_m(m, operand, chip.tile_m)
    steps = pl.cdiv(packed, tile)
    tile_blocks = _blocks(tile, packed, blocks, format)
    x = pad_to(to_tiles(x.astype(operand), tile, format), 1, bm)

    def kernel(x, codes, scales, out, total):
        step = pl.program_id(3)

        @pl.when(step == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        spread = None
        if format.block_size:
            known = _masked(scales[0], 0, step * tile_blocks, blocks)
            spread = _spread(known, tile, format)
        packed = codes[0]
        for plane in range(planes):
            w = _decode(packed, spread, plane, format)
            part = x[0, :, plane * tile : (plane + 1) * tile]
            total[...] += _multiply(part, w, 1)

        @pl.when(step == steps - 1)
        def _():
            result = total[...]
            if not format.block_size:
                result = result * scales[0].astype(jnp.float32)
            out[0] = result

    out = pl.pallas_call(
        kernel,
        grid=(batch, x.shape[1] // bm, pl.cdiv(rows, bn), steps),
        in_specs=[
            pl.BlockSpec((1, bm, tile * planes), lambda b, i, j, k: (b, i, k)),
            pl.BlockSpec((1, bn, tile), lambda b, i, j, k: (b, j, k)),
            pl.BlockSpec(
                (1, tile_blocks, bn),
                (lambda b, i, j, k: (b, k, j))
                if format.block_size
                else (lambda b, i, j, k: (b, 0, j)),
            ),
        ],
        out_specs=pl.BlockSpec((1, bm, bn), lambda b, i, j, k: (b, i, j)),
        out_shape=result_like(x, rows),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=chip.memory,
        ),
        interpret=interpret,
        name=f"{format.name}_columns",
    )(x, codes, jnp.swapaxes(scales, 1, 2))
    return out[:, :m]


def contract_rows(
    x, codes, scales, *, format: Format, operand, chip: Chip, interpret: bool
):
    """`x @ w`"""
    batch, m, _ = x.shape
    _, rows, packed = codes.shape
    blocks = scales.shape[-1]
    planes = 8 // format.bits
    tile = _tile_bytes(packed, format)
    bn = _tile_rows(rows)
    bm = _tile_m(m, operand, chip.tile_m // 2)
    steps = pl.cdiv(rows, bn)
    tiles = pl.cdiv(packed, tile)
    tile_blocks = _blocks(tile, packed, blocks, format)
    x = x.astype(operand)
    if not format.block_size:
        x = (x * scales[..., 0][:, None, :]).astype(operand)
    x = pad_to(pad_to(x, 1, bm), 2, bn)

    def kernel(x, codes, scales, out, total):
        step = pl.program_id(3)

        @pl.when(step == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        spread = None
        if format.block_size:
            known = _masked(scales[0], 1, step * bn, rows)
            spread = _spread(known, tile, format)
        packed = codes[0]
        for plane in range(planes):
            w = _decode(packed, spread, plane, format)
            part = slice(plane * tile, (plane + 1) * tile)
            total[:, part] += _multiply(x[0], w, 0)

        @pl.when(step == steps - 1)
        def _():
            out[0] = total[...]

    out = pl.pallas_call(
        kernel,
        grid=(batch, x.shape[1] // bm, tiles, steps),
        in_specs=[
            pl.BlockSpec((1, bm, bn), lambda b, i, j, k: (b, i, k)),
            pl.BlockSpec((1, bn, tile), lambda b, i, j, k: (b, k, j)),
            pl.BlockSpec(
                (1, tile_blocks, bn),
                (lambda b, i, j, k: (b, j, k))
                if format.block_size
                else (lambda b, i, j, k: (b, 0, k)),
            ),
        ],
        out_specs=pl.BlockSpec((1, bm, tile * planes), lambda b, i, j, k: (b, i, j)),
        out_shape=result_like(x, tiles * tile * planes),
        scratch_shapes=[pltpu.VMEM((bm, tile * planes), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=chip.memory,
        ),
        interpret=interpret,
        name=f"{format.name}_rows",
    )(x, codes, jnp.swapaxes(scales, 1, 2))
    return from_tiles(out[:, :m], tile, packed * planes, format)
