"""Codes as the kernels use them. Three bits are unpacked to four, in vector memory.

A group of 64 codes is stored as 16 bytes of their low two bits, in four planes, and 8
bytes of the high one, in eight. Unpacked it is 32 bytes of two planes.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped

from ...formats import Format, num_bytes
from ._tiles import bits_of, lanes, look_up


def stored_bytes(size: int, format: Format) -> int:
    """How many bytes are stored for so many."""
    return num_bytes(size * 8 // bits_of(format), format.bits)


def used_bytes(stored: int, format: Format) -> int:
    """The inverse of [`stored_bytes`][]."""
    return stored * bits_of(format) // format.bits


def read(codes, start: int, size: int, format: Format) -> Shaped[Array, "rows size"]:
    """In a kernel: some bytes of each row, from the first of a register on."""
    if format.bits != 3:
        return codes[:, start : start + size]
    parts = [_unpacked(codes, at, format) for at in range(start, start + size, lanes)]
    return jnp.concatenate(parts, 1) if len(parts) > 1 else parts[0]


def _div(x: Array, by: int) -> Array:
    return lax.div(x, jnp.int32(by))


def _rem(x: Array, by: int) -> Array:
    return lax.rem(x, jnp.int32(by))


def _unpacked(codes, start: int, format: Format):
    rows = codes.shape[0]
    quarter = format.group // 8  # Of the bytes that a group is unpacked to.

    def words(register: int):
        part = codes[:, register * lanes : (register + 1) * lanes]
        return pltpu.bitcast(part, jnp.uint32)

    def gather(first: int, repeat: int) -> Array:
        """Byte `first`, and `repeat` of those that follow, of each stored group."""

        def source(lane, div, rem):
            at = lane + start
            group, within = div(at, 4 * quarter), rem(at, 4 * quarter)
            return group * (3 * quarter) + first + rem(within, repeat)

        lane = lax.broadcasted_iota(jnp.int32, (rows // 4, lanes), 1)
        index = source(lane, _div, _rem)
        used = source(np.arange(lanes), np.floor_divide, np.remainder) // lanes
        lowest, *others = range(int(used.min()), int(used.max()) + 1)
        out = look_up(words(lowest), _rem(index, lanes), 1)
        for register in others:
            part = look_up(words(register), _rem(index, lanes), 1)
            out = jnp.where(index >= register * lanes, part, out)
        return out

    low, high = gather(0, 2 * quarter), gather(2 * quarter, quarter)
    lane = lax.broadcasted_iota(jnp.int32, low.shape, 1) + start
    which = _rem(_div(lane, quarter), 4)
    low = jnp.where(which >= 2, low >> 2, low)
    left = jnp.where(which == 0, high << 2, high << 1)
    right = jnp.where(which == 2, high, high >> 1)
    high = jnp.where(which < 2, left, right)
    # What shifts bring in from other bytes is masked.
    both = (low & jnp.uint32(0x33333333)) | (high & jnp.uint32(0x44444444))
    return pltpu.bitcast(both, jnp.uint8)
