"""Packing of sub-byte codes into uint8 bytes.

The layout is *planar within a group*: a group of `group` consecutive codes of `bits`
bits becomes `group * bits / 8` bytes, and bit plane `p` of these bytes (lowest bits
first) contains the `p`-th run of `group * bits / 8` consecutive codes. For NF4 with
groups of 64, the low nibbles contain codes 0-31 of the group, and the high nibbles
codes 32-63.

Codes of 3, 5 and 6 bits have two parts in each group: first their low 2, 4 or 4 bits,
then their high 1, 1 or 2 bits. A group of 64 three-bit codes has 16 bytes of the first
part and 8 bytes of the second.

A byte also holds five ternary digits, as in TQ1_0 of GGUF files. Each 64 digits take 13
bytes: 12 bytes of five digits and a byte of four. Plane `p` of a group consists of
digit `p` of every byte, and then of a quarter of the fifth digits.

So a decoder never interleaves. It shifts whole bytes, and gets the codes in *plane
order* `(plane, group, byte)` rather than in logical order `(group, plane, byte)`. A
product permutes its small operand, the activation, to match. Codes with two parts have
the planes of their low part.
"""

from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Integer, Shaped


# The bits of the low and the high part of codes with two parts.
_parts: dict[Any, tuple[int, int]] = {3: (2, 1), 5: (4, 1), 6: (4, 2)}
# The bits of a ternary digit.
DIGIT = Fraction(13, 8)


def parts_of(bits: int) -> tuple[int, int]:
    """Return the bits of the low and the high part of codes with two parts."""
    return _parts[bits]


def is_in_two_parts(bits: int | Fraction) -> bool:
    """Return whether some codes are not in the byte at their position in a plane: their
    high part, or digits that are the fifth of a byte."""
    return bits in _parts or bits == DIGIT


def planes_of(bits: int | Fraction) -> int:
    """Return the number of codes in a byte, or in a byte of the low part."""
    if bits == DIGIT:
        return 4
    return 8 // (_parts[bits][0] if bits in _parts else bits)


def group_multiple(bits: int | Fraction) -> int:
    """Return the divisor of group sizes that fill whole bytes."""
    if bits == DIGIT:
        return 64
    return 8 // _parts[bits][1] if bits in _parts else planes_of(bits)


def num_codes(size: int, bits: int | Fraction) -> int:
    """Return the number of codes in `size` bytes."""
    return size * 8 // bits


def num_bytes(codes: int, bits: int | Fraction) -> int:
    """Return the number of bytes of `codes` codes."""
    return codes * bits // 8


def pack(
    codes: Integer[Array, "*groups group"] | Integer[np.ndarray, "*groups group"],
    bits: int | Fraction,
) -> Any:
    """Pack groups of codes below `2**bits`, for JAX or NumPy arrays."""
    if isinstance(bits, Fraction):
        return _pack_digits(codes)
    if bits in _parts:
        low_bits, high_bits = _parts[bits]
        low = pack(codes & np.uint8(2**low_bits - 1), low_bits)
        high = pack(codes >> np.uint8(low_bits), high_bits)
        xp = np if isinstance(codes, np.ndarray) else jnp
        return xp.concatenate([low, high], -1)
    planes = planes_of(bits)
    size = codes.shape[-1] // planes
    packed = codes[..., :size]
    for plane in range(1, planes):
        part = codes[..., plane * size : (plane + 1) * size]
        packed = packed | (part << np.uint8(plane * bits))
    return packed


def unpack_planes(
    packed: Integer[Array, "*lead packed"], bits: int | Fraction, group: int
) -> Integer[Array, "*lead planes bytes"]:
    """Unpack codes in plane order, with one shift and one mask per plane."""
    if isinstance(bits, Fraction):
        return _unpack_digits(packed, group)
    if bits in _parts:
        return _unpack_parts(packed, bits, group)
    planes = planes_of(bits)
    if planes == 1:
        return packed[..., None, :]
    shape = (*[1] * (packed.ndim - 1), planes, 1)
    shifts = lax.broadcasted_iota(jnp.uint8, shape, packed.ndim - 1) * jnp.uint8(bits)
    return (packed[..., None, :] >> shifts) & jnp.uint8(2**bits - 1)


def _unpack_parts(packed, bits: int, group: int):
    *lead, size = packed.shape
    low_bits, high_bits = _parts[bits]
    groups = num_codes(size, bits) // group
    low_bytes, high_bytes = num_bytes(group, low_bits), num_bytes(group, high_bits)
    parts = packed.reshape(*lead, groups, low_bytes + high_bytes)
    flat = lambda x: x.reshape(*lead, groups * low_bytes)
    low = unpack_planes(flat(parts[..., :low_bytes]), low_bits, group)
    # A plane of the low part is as long as `copies` planes of the high part.
    copies = low_bytes // high_bytes
    high = flat(jnp.concatenate([parts[..., low_bytes:]] * copies, -1))
    plane = np.repeat(np.arange(copies), high_bytes) * high_bits
    shifts = np.arange(planes_of(bits))[:, None] * copies * high_bits
    shifts = np.asarray(shifts + np.tile(plane, groups), np.uint8)
    shifts = shifts.reshape(*[1] * len(lead), *shifts.shape)
    high = (high[..., None, :] >> shifts) & jnp.uint8(2**high_bits - 1)
    return low | (high << jnp.uint8(low_bits))


def _pack_digits(codes: Any) -> Any:
    xp = np if isinstance(codes, np.ndarray) else jnp
    *lead, group = codes.shape
    planes = codes.astype(np.uint16).reshape(*lead, 4, group // 4)
    size = num_bytes(group, DIGIT)
    last = planes[..., size:].reshape(*lead, -1)
    value = xp.pad(last, [(0, 0)] * len(lead) + [(0, size - last.shape[-1])])
    for plane in range(4):
        value = value + planes[..., plane, :size] * np.uint16(3 ** (4 - plane))
    # The first digit is the integer part of three times the byte as a fraction of 256.
    return ((value * np.uint16(256) + np.uint16(242)) // np.uint16(243)).astype(
        np.uint8
    )


def _unpack_digits(packed, group: int):
    *lead, _ = packed.shape
    rows = packed.reshape(*lead, -1, num_bytes(group, DIGIT))
    powers = np.array([1, 3, 9, 27, 81], np.uint8).reshape(*[1] * len(lead), 5, 1, 1)
    fractions = rows[..., None, :, :] * powers  # Integer parts overflow.
    digits = ((fractions.astype(jnp.uint16) * 3) >> 8).astype(jnp.uint8)
    last = digits[..., 4, :, : group * 3 // 16]
    last = last.reshape(*last.shape[:-1], 4, -1)
    planes = [digits[..., :4, :, :], jnp.swapaxes(last, -3, -2)]
    return jnp.concatenate(planes, -1).reshape(*lead, 4, -1)


def unpack(
    packed: Integer[Array, "*lead packed"], bits: int | Fraction, group: int
) -> Integer[Array, "*lead size"]:
    """Invert [`pack`][], for consecutive groups."""
    *lead, size = packed.shape
    planes = unpack_planes(packed, bits, group).reshape(*lead, num_codes(size, bits))
    return from_plane_order(planes, bits, group)


def to_plane_order(
    x: Shaped[Array, "*lead size"], bits: int | Fraction, group: int
) -> Shaped[Array, "*lead size"]:
    """Permute the last axis from logical order to plane order."""
    planes = planes_of(bits)
    if planes == 1:
        return x
    *lead, size = x.shape
    x = x.reshape(*lead, size // group, planes, group // planes)
    return jnp.swapaxes(x, -3, -2).reshape(*lead, size)


def from_plane_order(
    x: Shaped[Array, "*lead size"], bits: int | Fraction, group: int
) -> Shaped[Array, "*lead size"]:
    """Invert [`to_plane_order`][]."""
    planes = planes_of(bits)
    if planes == 1:
        return x
    *lead, size = x.shape
    x = x.reshape(*lead, planes, size // group, group // planes)
    return jnp.swapaxes(x, -3, -2).reshape(*lead, size)
