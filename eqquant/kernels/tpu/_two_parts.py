"""Read codes into registers. Codes of 3 bits are unpacked to 4 bits in vector memory,
and codes of 5 and 6 bits to 8 bits.

A group of 64 codes of 3 bits is stored as 16 bytes with the low two bits of each code,
in four planes, and 8 bytes with the high bits, in eight planes. The unpacked group is
32 bytes in two planes. Each code is in the upper three bits of its half of a byte.

A group of 64 codes of 5 or 6 bits is stored as 32 bytes with the low four bits, in two
planes, and 8 or 16 bytes with the high bits. The unpacked group is 64 bytes, one plane.
Each code is in the upper bits of its byte.

Codes with a history have 3 bits, and two consecutive codes share an unpacked byte. Two
bytes have the low bits of four consecutive codes from the same byte.
"""

import functools as ft
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped

from ...formats import Format, is_in_two_parts, num_bytes, parts_of
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
    if not is_in_two_parts(format.bits):
        return codes[:, start : start + size]
    parts = [_unpack(codes, at, format) for at in range(start, start + size, lanes)]
    return jnp.concatenate(parts, 1) if len(parts) > 1 else parts[0]


def _div(x: Array, by: int) -> Array:
    return lax.div(x, jnp.int32(by))


def _rem(x: Array, by: int) -> Array:
    return lax.rem(x, jnp.int32(by))


def _unpack(codes, start: int, format: Format):
    """Unpack one register, from unpacked byte `start` on."""
    rows, group = codes.shape[0], format.group
    # The bytes of the low and of the high part of a group, and of the unpacked group.
    sizes = [num_bytes(group, bits) for bits in parts_of(format.bits)]
    stored, unpacked = sum(sizes), num_bytes(group, bits_of(format))
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

    # Unpacked bytes for one byte of the low part that are next to each other.
    pair = 2 if format.history else 1

    def gather(first: int, repeat: int) -> Array:
        """Gather `repeat` bytes of each stored group from byte `first` on."""

        def source(lane, div, rem):
            at = lane + start
            within = div(rem(at, unpacked), pair)
            return div(at, unpacked) * stored + first + rem(within, repeat)

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

    low, high = gather(0, sizes[0]), gather(*sizes)
    within = _rem(lane + start % unpacked, unpacked)
    merge = _in_half_bytes if format.bits == 3 else _in_bytes
    planes = [_div(within, size) for size in sizes]
    if format.history:
        merge, second = _in_half_bytes_of_a_pair, _rem(within, 2)
        planes = [second, second * 4 + _div(within, 2 * sizes[1])]
    whole = merge(low, high, planes, format)
    return pltpu.bitcast(whole, jnp.uint8)


def _shift(shift: Callable, words: Array, by: Array | int) -> Array:
    return shift(words, lax.convert_element_type(by, jnp.uint32))


# Both parts are in the plane `planes` of their bytes. These functions move the bits to
# the top of each half byte or byte. The masks clear bits of other bytes.


def _in_half_bytes(low, high, planes: list, format: Format) -> Array:
    del format
    low = _shift(lax.shift_left, low, 1 - planes[0])
    low = _shift(lax.shift_right_logical, low, planes[0])
    high = _shift(lax.shift_left, high, 3 - planes[1])
    return (low & jnp.uint32(0x66666666)) | (high & jnp.uint32(0x88888888))


def _in_half_bytes_of_a_pair(low, high, planes: list, format: Format) -> Array:
    """`planes` are the pair of codes in the byte of the low part, and the bit of the
    high part that belongs to the first code of the pair."""
    del format
    low = _shift(lax.shift_right_logical, low, planes[0] * 4)
    high = _shift(lax.shift_right_logical, high, planes[1])
    low = ((low << 1) & jnp.uint32(0x06060606)) | ((low << 3) & jnp.uint32(0x60606060))
    high = ((high << 3) & jnp.uint32(0x08080808)) | (
        (high << 5) & jnp.uint32(0x80808080)
    )
    return low | high


def _in_bytes(low, high, planes: list, format: Format) -> Array:
    unused = 8 - format.bits
    shifts = unused, unused + parts_of(format.bits)[0]
    words = jnp.zeros_like(low)
    parts = zip((low, high), parts_of(format.bits), planes, shifts, strict=True)
    for part, bits, plane, shift in parts:
        part = _shift(lax.shift_right_logical, part, plane * bits)
        mask = jnp.uint32(((1 << bits) - 1) * 0x01010101)
        words = words | ((part & mask) << shift)
    return words
