"""Codes as the kernels use them. Three bits are unpacked to four, in vector memory.

A group of 64 codes is stored as 16 bytes of their low two bits, in four planes, and 8
bytes of the high one, in eight. Unpacked it is 32 bytes of two planes, with each code
in the upper three bits of its half.
"""

import functools as ft

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
    lane = lax.broadcasted_iota(jnp.int32, (rows // 4, lanes), 1)
    # The first stored byte, if no group begins in another register.
    edge = stored_bytes(start, format) % lanes

    @ft.cache
    def words(register: int):
        part = codes[:, register * lanes : (register + 1) * lanes]
        return pltpu.bitcast(part, jnp.uint32)

    @ft.cache
    def both(register: int):
        """The lanes of a register from the edge on, and those of the next before."""
        return jnp.where(lane >= edge, words(register), words(register + 1))

    def gather(first: int, repeat: int) -> Array:
        """Byte `first`, and `repeat` of those that follow, of each stored group."""

        def source(lane, div, rem):
            at = lane + start
            group, within = div(at, 4 * quarter), rem(at, 4 * quarter)
            return group * (3 * quarter) + first + rem(within, repeat)

        index = source(lane, _div, _rem)
        used = source(np.arange(lanes), np.floor_divide, np.remainder)
        registers = used // lanes
        lowest, *others = range(int(registers.min()), int(registers.max()) + 1)
        index_in_register = _rem(index, lanes)
        # To select before looks up once.
        if len(others) == 1 and np.all((used % lanes >= edge) == (registers == lowest)):
            return look_up(both(lowest), index_in_register, 1)
        out = look_up(words(lowest), index_in_register, 1)
        for register in others:
            part = look_up(words(register), index_in_register, 1)
            out = jnp.where(index >= register * lanes, part, out)
        return out

    low, high = gather(0, 2 * quarter), gather(2 * quarter, quarter)
    # To the top of each half: what shifts bring in from other bytes is masked.
    which = _rem(_div(lane + start % (4 * quarter), quarter), 4)
    later = lax.convert_element_type(which >= 2, jnp.uint32)
    low = lax.shift_right_logical(lax.shift_left(low, 1 - later), later)
    high = lax.shift_left(high, lax.convert_element_type(3 - which, jnp.uint32))
    whole = (low & jnp.uint32(0x66666666)) | (high & jnp.uint32(0x88888888))
    return pltpu.bitcast(whole, jnp.uint8)
