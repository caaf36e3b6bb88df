"""How operands are cut and ordered for the kernels."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer, Shaped

from ...formats import Format


# Of a register, along its last axis.
lanes = 128


def look_up(
    table: Shaped[Array, "rows columns"], index: Integer[Array, "m n"], axis: int
) -> Shaped[Array, "m n"]:
    """In a kernel: `jnp.take_along_axis` without bounds. From JAX 0.12 on that passes
    on indices of 32 bits, and the hardware wants bytes to look up bytes."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(axis,),
        start_index_map=(axis,),
        operand_batching_dims=(1 - axis,),
        start_indices_batching_dims=(1 - axis,),
    )
    index = lax.reshape(index, (*index.shape, 1))
    return lax.gather(table, index, numbers, (1, 1), mode="promise_in_bounds")


def pad_to(x: Array, axis: int, multiple: int) -> Array:
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


def bits_of(format: Format) -> int:
    """Of a code as the kernels use it: those of three bits are unpacked to four (see
    `_three_bits.py`). Bytes of a row are such bytes, if nothing else is said."""
    return 4 if format.bits == 3 else format.bits


def planes_of(format: Format) -> int:
    """How many codes are in a byte."""
    return 8 // bits_of(format)


def chunk_bytes(format: Format) -> int:
    """How many bytes of a row are brought in order together: whole registers, and whole
    groups of codes."""
    return math.lcm(lanes, format.group * bits_of(format) // 8)


def tile_multiple(format: Format) -> int:
    """What the bytes of a tile are a multiple of: these are whole registers as they are
    stored, too."""
    return math.lcm(chunk_bytes(format), 4 * lanes if format.bits == 3 else lanes)


def to_tiles(
    x: Shaped[Array, "batch m columns"], tile: int, format: Format
) -> Shaped[Array, "batch m padded"]:
    """The columns in plane order within each tile of so many bytes."""
    planes = planes_of(format)
    x = pad_to(x, -1, tile * planes)
    if planes == 1:
        return x
    batch, m, columns = x.shape
    width = format.group // planes
    x = x.reshape(batch, m, columns // (tile * planes), tile // width, planes, width)
    return jnp.swapaxes(x, -3, -2).reshape(batch, m, columns)


def from_tiles(
    x: Float[Array, "batch m padded"], tile: int, columns: int, format: Format
) -> Float[Array, "batch m columns"]:
    planes = planes_of(format)
    if planes > 1:
        batch, m, padded = x.shape
        width = format.group // planes
        x = x.reshape(batch, m, padded // (tile * planes), planes, tile // width, width)
        x = jnp.swapaxes(x, -3, -2).reshape(batch, m, padded)
    return x[..., :columns]


def result_like(x: Shaped[Array, "batch m size"], *shape_and_dtype):
    """A result of shape `(batch, *shape)`, which inside of shard_map varies as the
    operands do."""
    *shape, dtype = shape_and_dtype
    like = lambda x: jnp.broadcast_to(x[:, :1, :1].astype(dtype), (len(x), *shape))
    return jax.eval_shape(like, x)
