"""Products with quantized weights on TPU: Pallas kernels that decode on the fly.

A tile of codes is decoded in vector memory and multiplied at once. Nothing is expanded
outside: codes enter as they are stored, scales too (TPUs keep a narrow matrix transposed
in memory, and the kernel reads it that way), and only the activation, the small operand,
is permuted and padded.

What lies outside of an array in the last tile of an axis is undefined: the activation is
padded with zeros there, and scales are masked, as zero times NaN would not be zero.
"""

import functools as ft
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int8, UInt8

from ..formats import Format, Precision
from . import xla


_lanes = 128


def dot(
    x: Float[Array, "*batch m size"],
    codes: UInt8[Array, "*batch rows packed"] | Int8[Array, "*batch rows packed"],
    scales: Float[Array, "*batch rows blocks"],
    *,
    format: Format,
    contract_rows: bool,
    precision: Precision,
    weight_dtype,
    out_dtype,
    interpret: bool = False,
) -> Float[Array, "*batch m out"]:
    """As [`eqquant.kernels.xla.dot`][], by a Pallas kernel where there is one."""
    reason = why_not(x.dtype, codes.shape, scales, format, weight_dtype)
    if reason is not None or 0 in (*x.shape, *codes.shape):
        return xla.dot(
            x,
            codes,
            scales,
            format=format,
            contract_rows=contract_rows,
            precision=precision,
            weight_dtype=weight_dtype,
            out_dtype=out_dtype,
        )
    batch = codes.shape[:-2]

    def flat(a):
        return a.reshape(-1, *a.shape[-2:])

    call = _contract_rows if contract_rows else _contract_columns
    out = call(
        flat(x),
        flat(codes),
        flat(scales),
        format=format,
        operand=_operand(x.dtype, weight_dtype, precision),
        interpret=interpret,
    )
    return out.reshape(*batch, *out.shape[-2:]).astype(out_dtype)


def why_not(x_dtype, codes_shape, scales, format: Format, weight_dtype) -> str | None:
    """Why a product has no kernel, if it has none."""
    for dtype in (x_dtype, weight_dtype, scales.dtype):
        if jnp.dtype(dtype).itemsize > 4:
            return f"TPU kernels compute in float32 at most, not {jnp.dtype(dtype)}"
    *_, rows, packed = codes_shape
    if _tile_bytes(packed, format) * _tile_rows(rows) > 2**21:
        return f"a block of {format.block_size} values is too long for a tile"
    return None


def _operand(x_dtype, weight_dtype, precision: Precision):
    """What the matrix unit multiplies."""
    exact = jnp.promote_types(x_dtype, weight_dtype) == jnp.float32
    return jnp.float32 if exact and precision != "default" else jnp.bfloat16


def _tile_rows(rows: int) -> int:
    """Of a tile: all of them, or a whole number of registers."""
    return rows if rows <= 256 else 256


def _tile_bytes(packed: int, format: Format) -> int:
    """Columns of a tile, packed: all of them, or whole registers and whole blocks."""
    block = (format.block_size or format.group) * format.bits // 8
    # Scales come in whole registers too: 8 rows of 32 bits, or 16 of 16 bits.
    whole = math.lcm(_lanes, block * (16 if format.block_size else 1))
    size = math.ceil(512 / whole) * whole
    return packed if packed <= size else size


def _blocks(tile: int, packed: int, blocks: int, format: Format) -> int:
    """How many scales a row of a tile has."""
    if format.block_size is None or tile == packed:
        return blocks
    return tile * 8 // format.bits // format.block_size


def _tile_m(m: int, itemsize: int) -> int:
    return min(math.ceil(m / (32 // itemsize)) * (32 // itemsize), 512)


def _pad_to(x: Array, axis: int, multiple: int) -> Array:
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


def _to_tiles(
    x: Float[Array, "batch m columns"], tile: int, format: Format
) -> Float[Array, "batch m padded"]:
    """The columns in plane order within each tile of so many bytes."""
    planes = 8 // format.bits
    x = _pad_to(x, -1, tile * planes)
    if planes == 1:
        return x
    batch, m, columns = x.shape
    width = format.group // planes
    x = x.reshape(batch, m, columns // (tile * planes), tile // width, planes, width)
    return jnp.swapaxes(x, -3, -2).reshape(batch, m, columns)


def _from_tiles(
    x: Float[Array, "batch m padded"], tile: int, columns: int, format: Format
) -> Float[Array, "batch m columns"]:
    planes = 8 // format.bits
    if planes > 1:
        batch, m, padded = x.shape
        width = format.group // planes
        x = x.reshape(batch, m, padded // (tile * planes), planes, tile // width, width)
        x = jnp.swapaxes(x, -3, -2).reshape(batch, m, padded)
    return x[..., :columns]


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
    block = format.block_size * format.bits // 8
    scales = scales.astype(jnp.float32).T
    rows, blocks = scales.shape
    scales = _pad_to(scales, 1, _lanes)
    lane = lax.broadcasted_iota(jnp.int32, (rows, _lanes), 1)
    parts = []
    for start in range(0, tile, _lanes):
        first = start // block // _lanes * _lanes
        index = lax.div(lane + start, jnp.int32(block)) - first
        source = scales[:, first : first + _lanes]
        parts.append(
            jnp.take_along_axis(source, index, axis=1, mode="promise_in_bounds")
        )
    return jnp.concatenate(parts, 1)[:, :tile] if len(parts) > 1 else parts[0][:, :tile]


def _masked(scales, axis: int, start: Int[Array, ""], size: int):
    """Zero in place of what lies beyond an axis."""
    index = start + lax.broadcasted_iota(jnp.int32, scales.shape, axis)
    return jnp.where(index < size, scales, jnp.zeros_like(scales))


def _result(x: Float[Array, "batch m size"], free: int) -> jax.ShapeDtypeStruct:
    """The shape of a result, which inside of shard_map varies as the operands do."""
    shape = (*x.shape[:2], free)
    like = lambda x: jnp.broadcast_to(x[:, :, :1].astype(jnp.float32), shape)
    return jax.eval_shape(like, x)


def _multiply(x, w, contract: int):
    return lax.dot_general(
        x,
        w.astype(x.dtype),
        (((1,), (contract,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _contract_columns(x, codes, scales, *, format: Format, operand, interpret: bool):
    """`x @ w.T`"""
    batch, m, _ = x.shape
    _, rows, packed = codes.shape
    blocks = scales.shape[-1]
    planes = 8 // format.bits
    tile = _tile_bytes(packed, format)
    bn = _tile_rows(rows)
    bm = _tile_m(m, jnp.dtype(operand).itemsize)
    steps = pl.cdiv(packed, tile)
    tile_blocks = _blocks(tile, packed, blocks, format)
    x = _pad_to(_to_tiles(x.astype(operand), tile, format), 1, bm)

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
        out_shape=_result(x, rows),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name=f"{format.name}_columns",
    )(x, codes, jnp.swapaxes(scales, 1, 2))
    return out[:, :m]


def _contract_rows(x, codes, scales, *, format: Format, operand, interpret: bool):
    """`x @ w`"""
    batch, m, _ = x.shape
    _, rows, packed = codes.shape
    blocks = scales.shape[-1]
    planes = 8 // format.bits
    tile = _tile_bytes(packed, format)
    bn = _tile_rows(rows)
    bm = _tile_m(m, jnp.dtype(operand).itemsize)
    steps = pl.cdiv(rows, bn)
    tiles = pl.cdiv(packed, tile)
    tile_blocks = _blocks(tile, packed, blocks, format)
    x = x.astype(operand)
    if not format.block_size:
        x = (x * scales[..., 0][:, None, :]).astype(operand)
    x = _pad_to(_pad_to(x, 1, bm), 2, bn)

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
        out_shape=_result(x, tiles * tile * planes),
        scratch_shapes=[pltpu.VMEM((bm, tile * planes), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name=f"{format.name}_rows",
    )(x, codes, jnp.swapaxes(scales, 1, 2))
    return _from_tiles(out[:, :m], tile, packed * planes, format)
