"""Sub-byte codes <-> uint8 bytes, and nothing else.

The layout is *planar within a group*: a group of `group` consecutive codes of `bits`
bits becomes `group * bits / 8` bytes, and bit plane `p` of those bytes (lowest bits
first) holds the `p`-th run of `group * bits / 8` consecutive codes. For NF4 with groups
of 64: the low nibbles hold codes 0-31 of the group, the high nibbles codes 32-63.

Codes of three bits are two such parts, one after the other in each group: their low two
bits, and then their high one. A group of 64 has 16 bytes of the first and 8 of the
second.

A decoder therefore never interleaves: it shifts whole bytes, and gets the codes in
*plane order* `(plane, group, byte)` rather than in their logical order `(group, plane,
byte)`. A product permutes its small operand, the activation, to match. Three bits have
the planes of their low two.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer, Shaped


def planes_of(bits: int) -> int:
    """How many codes are in the bits of one byte."""
    return 8 // (2 if bits == 3 else bits)


def group_multiple(bits: int) -> int:
    """What the size of a group is a multiple of, so that it fills its bytes."""
    return 8 if bits == 3 else planes_of(bits)


def num_codes(size: int, bits: int) -> int:
    """How many codes so many bytes hold."""
    return size * 8 // bits


def num_bytes(codes: int, bits: int) -> int:
    """How many bytes so many codes take."""
    return codes * bits // 8


def pack(
    codes: Integer[Array, "*groups group"] | Integer[np.ndarray, "*groups group"],
    bits: int,
) -> Any:
    """Pack groups of codes below `2**bits`: of JAX, or of NumPy."""
    if bits == 3:
        low, high = pack(codes & np.uint8(3), 2), pack(codes >> np.uint8(2), 1)
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
    packed: Integer[Array, "*lead packed"], bits: int, group: int
) -> Integer[Array, "*lead planes bytes"]:
    """The codes in plane order: one shift and one mask per plane."""
    if bits == 3:
        return _unpack_three(packed, group)
    planes = planes_of(bits)
    if planes == 1:
        return packed[..., None, :]
    shifts = jnp.arange(planes, dtype=jnp.uint8) * jnp.uint8(bits)
    return (packed[..., None, :] >> shifts[:, None]) & jnp.uint8(2**bits - 1)


def _unpack_three(packed, group: int):
    *lead, size = packed.shape
    groups, half = num_codes(size, 3) // group, group // 8
    parts = packed.reshape(*lead, groups, 3 * half)
    flat = lambda x: x.reshape(*lead, groups * 2 * half)
    low = unpack_planes(flat(parts[..., : 2 * half]), 2, group)
    # Two planes of one bit lie along one of two bits.
    high = flat(jnp.concatenate([parts[..., 2 * half :]] * 2, -1))
    second = jnp.arange(2 * half, dtype=jnp.uint8) >= jnp.uint8(half)
    planes = jnp.arange(4, dtype=jnp.uint8)
    shifts = 2 * planes[:, None] + jnp.tile(second.astype(jnp.uint8), groups)
    return low | (((high[..., None, :] >> shifts) & jnp.uint8(1)) << jnp.uint8(2))


def unpack(
    packed: Integer[Array, "*lead packed"], bits: int, group: int
) -> Integer[Array, "*lead size"]:
    """Inverse of [`pack`][], for groups one after the other."""
    *lead, size = packed.shape
    planes = unpack_planes(packed, bits, group).reshape(*lead, num_codes(size, bits))
    return from_plane_order(planes, bits, group)


def to_plane_order(
    x: Shaped[Array, "*lead size"], bits: int, group: int
) -> Shaped[Array, "*lead size"]:
    """Permute the last axis from logical order to plane order."""
    planes = planes_of(bits)
    if planes == 1:
        return x
    *lead, size = x.shape
    x = x.reshape(*lead, size // group, planes, group // planes)
    return jnp.swapaxes(x, -3, -2).reshape(*lead, size)


def from_plane_order(
    x: Shaped[Array, "*lead size"], bits: int, group: int
) -> Shaped[Array, "*lead size"]:
    """Inverse of [`to_plane_order`][]."""
    planes = planes_of(bits)
    if planes == 1:
        return x
    *lead, size = x.shape
    x = x.reshape(*lead, planes, size // group, group // planes)
    return jnp.swapaxes(x, -3, -2).reshape(*lead, size)
