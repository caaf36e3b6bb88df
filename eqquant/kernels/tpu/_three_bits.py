"""Read codes into registers. 3-bit codes are unpacked to 4 bits in vector memory.

A group of 64 codes is stored as 16 bytes with the low two bits of each code, in four
planes, and 8 bytes with the high bits, in eight planes. The unpacked group is 32 bytes
in two planes. Each code is in the upper three bits of its half of a byte.
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
    """Return the stored bytes for `size` unpacked bytes."""
    return num_bytes(size * 8 // bits_of(format), format.bits)


def used_bytes(stored: int, format: Format) -> int:
    """Invert [`stored_bytes`][]."""
    return stored * bits_of(format) // format.bits


def read(codes, start: int, size: int, format: Format) -> Shaped[Array, "rows size"]:
    """Return `size` unpacked bytes of each row from byte `start` on, which starts a
    register."""
    if format.bits != 3:
        return codes[:, start : start + size]
    parts = [_unpack(codes, at, format) for at in range(start, start + size, lanes)]
    return jnp.concatenate(parts, 1) if len(parts) > 1 else parts[0]


def _div(x: Array, by: int) -> Array:
    return lax.div(x, jnp.int32(by))


def _rem(x: Array, by: int) -> Array:
    return lax.rem(x, jnp.int32(by))


def _unpack(codes, start: int, format: Format):
    """Unpack one register, from unpacked byte `start` on."""
    rows = codes.shape[0]
    quarter = format.group // 8  # A quarter of the unpacked bytes of a group.
    lane = lax.broadcasted_iota(jnp.int32, (rows // 4, lanes), 1)
    # The lane of the first stored byte.
    edge = stored_bytes(start, format) % lanes

    @ft.cache
    def load(register: int):
        part = codes[:, register * lanes : (register + 1) * lanes]
        return pltpu.bitcast(part, jnp.uint32)

    @ft.cache
    def load_window(register: int):
        """Load the lanes from the edge on, preceded by lanes of the next register."""
        return jnp.where(lane >= edge, load(register), load(register + 1))

    def gather(first: int, repeat: int) -> Array:
        """Gather `repeat` bytes of each stored group from byte `first` on."""

        def source(lane, div, rem):
            at = lane + start
            group, within = div(at, 4 * quarter), rem(at, 4 * quarter)
            return group * (3 * quarter) + first + rem(within, repeat)

        index = source(lane, _div, _rem)
        used = source(np.arange(lanes), np.floor_divide, np.remainder)
        registers = used // lanes
        lowest, *others = range(int(registers.min()), int(registers.max()) + 1)
        index_in_register = _rem(index, lanes)
        # If two registers form one window, select first and look up once.
        if len(others) == 1 and np.all((used % lanes >= edge) == (registers == lowest)):
            return look_up(load_window(lowest), index_in_register, 1)
        out = look_up(load(lowest), index_in_register, 1)
        for register in others:
            part = look_up(load(register), index_in_register, 1)
            out = jnp.where(index >= register * lanes, part, out)
        return out

    low, high = gather(0, 2 * quarter), gather(2 * quarter, quarter)
    # Move bits to the top of each half. The masks clear bits of other bytes.
    position = _rem(_div(lane + start % (4 * quarter), quarter), 4)
    later = lax.convert_element_type(position >= 2, jnp.uint32)
    low = lax.shift_right_logical(lax.shift_left(low, 1 - later), later)
    high = lax.shift_left(high, lax.convert_element_type(3 - position, jnp.uint32))
    whole = (low & jnp.uint32(0x66666666)) | (high & jnp.uint32(0x88888888))
    return pltpu.bitcast(whole, jnp.uint8)
