"""Helpers to pad and to order the operands of the kernels."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer, Shaped

from ...formats import Format, from_plane_order, to_plane_order


# Lanes of a register.
lanes = 128


def look_up(
    table: Shaped[Array, "rows columns"], index: Integer[Array, "m n"], axis: int
) -> Shaped[Array, "m n"]:
    """Return `jnp.take_along_axis` without bounds checks, in a kernel.

    From JAX 0.12 on, `take_along_axis` casts indices to 32 bits. The hardware requires
    8-bit indices to look up bytes.
    """
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
    """Pad an axis with zeros to a multiple of `multiple`."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


def bits_of(format: Format) -> int:
    """Return the bits of a code in vector memory: kernels unpack codes of 3, 5 and 6
    bits in `_two_parts.py`. Numbers of bytes refer to unpacked codes by default."""
    bits = format.bits
    return 4 if bits == 3 else 8 if bits in (5, 6) else bits


def planes_of(format: Format) -> int:
    """Return the number of codes per byte."""
    return 8 // bits_of(format)


def plane_group(format: Format) -> int:
    """Return the `group` for `to_plane_order`. Unpacked codes with a history share a
    byte with the next codes."""
    return planes_of(format) if format.history else format.group


def block_bytes(format: Format) -> int:
    """Return the bytes of a block, or of a group of codes without blocks."""
    return (format.block_size or format.group) // planes_of(format)


def chunk_bytes(format: Format) -> int:
    """Return the bytes of a row that are permuted together: the smallest number of
    whole registers and whole groups of codes."""
    return math.lcm(lanes, format.group * bits_of(format) // 8)


def tile_multiple(format: Format) -> int:
    """Return the multiple of bytes per row of a tile. It is a multiple of whole
    registers of stored bytes as well."""
    whole = lanes * bits_of(format) // math.gcd(bits_of(format), format.bits)
    return math.lcm(chunk_bytes(format), whole)


def to_tiles(
    x: Shaped[Array, "batch m columns"], tile: int, format: Format
) -> Shaped[Array, "batch m padded"]:
    """Permute columns to plane order within each tile of `tile` bytes."""
    x = pad_to(x, -1, tile * planes_of(format))
    tiles = x.reshape(*x.shape[:-1], -1, tile * planes_of(format))
    return to_plane_order(tiles, bits_of(format), plane_group(format)).reshape(x.shape)


def from_tiles(
    x: Float[Array, "batch m padded"], tile: int, columns: int, format: Format
) -> Float[Array, "batch m columns"]:
    """Invert [`to_tiles`][] and drop the padding."""
    tiles = x.reshape(*x.shape[:-1], -1, tile * planes_of(format))
    x = from_plane_order(tiles, bits_of(format), plane_group(format)).reshape(x.shape)
    return x[..., :columns]


def result_like(x: Shaped[Array, "batch m size"], *shape_and_dtype):
    """Return the type of a result of shape `(batch, *shape)`. Inside of `shard_map` it
    varies over the same mesh axes as `x`."""
    *shape, dtype = shape_and_dtype
    like = lambda x: jnp.broadcast_to(x[:, :1, :1].astype(dtype), (len(x), *shape))
    return jax.eval_shape(like, x)
