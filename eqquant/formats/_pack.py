"""Packing of sub-byte codes into uint8 bytes.

The layout is *planar within a group*: a group of `group` consecutive codes of `bits`
bits becomes `group * bits / 8` bytes, and bit plane `p` of these bytes (lowest bits
first) contains the `p`-th run of `group * bits / 8` consecutive codes. For NF4 with
groups of 64, the low nibbles contain codes 0-31 of the group, and the high nibbles
codes 32-63.

Three-bit codes have two parts in each group: first their low two bits, then their high
bit. A group of 64 has 16 bytes of the first part and 8 bytes of the second.

So a decoder never interleaves. It shifts whole bytes, and gets the codes in *plane
order* `(plane, group, byte)` rather than in logical order `(group, plane, byte)`. A
product permutes its small operand, the activation, to match. Three-bit codes have the
planes of their low two bits.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer, Shaped


def planes_of(bits: int) -> int:
    """Return the number of codes in a byte."""
    return 8 // (2 if bits == 3 else bits)


def group_multiple(bits: int) -> int:
    """Return the divisor of group sizes that fill whole bytes."""
    return 8 if bits == 3 else planes_of(bits)


def num_codes(size: int, bits: int) -> int:
    """Return the number of codes in `size` bytes."""
    return size * 8 // bits


def num_bytes(codes: int, bits: int) -> int:
    """Return the number of bytes of `codes` codes."""
    return codes * bits // 8


def pack(
    codes: Integer[Array, "*groups group"] | Integer[np.ndarray, "*groups group"],
    bits: int,
) -> Any:
    """Pack groups of codes below `2**bits`, for JAX or NumPy arrays."""
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
    """Unpack codes in plane order, with one shift and one mask per plane."""
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
    # A plane of two-bit codes is as long as two planes of single bits.
    high = flat(jnp.concatenate([parts[..., 2 * half :]] * 2, -1))
    second = jnp.arange(2 * half, dtype=jnp.uint8) >= jnp.uint8(half)
    planes = jnp.arange(4, dtype=jnp.uint8)
    shifts = 2 * planes[:, None] + jnp.tile(second.astype(jnp.uint8), groups)
    return low | (((high[..., None, :] >> shifts) & jnp.uint8(1)) << jnp.uint8(2))


def unpack(
    packed: Integer[Array, "*lead packed"], bits: int, group: int
) -> Integer[Array, "*lead size"]:
    """Invert [`pack`][], for consecutive groups."""
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
    """Invert [`to_plane_order`][]."""
    planes = planes_of(bits)
    if planes == 1:
        return x
    *lead, size = x.shape
    x = x.reshape(*lead, planes, size // group, group // planes)
    return jnp.swapaxes(x, -3, -2).reshape(*lead, size)
