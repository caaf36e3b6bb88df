"""Sub-byte codes <-> uint8 bytes, and nothing else.

The layout is *planar within a group*: a group of `group` consecutive codes of `bits`
bits becomes `group * bits / 8` bytes, and bit plane `p` of those bytes (lowest bits
first) holds the `p`-th run of `group * bits / 8` consecutive codes. For NF4 with groups
of 64: the low nibbles hold codes 0-31 of the group, the high nibbles codes 32-63.

A decoder therefore never interleaves: it shifts whole bytes, and gets the codes in
*plane order* `(plane, group, byte)` rather than in their logical order `(group, plane,
byte)`. A product permutes its small operand, the activation, to match.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer, Shaped


def codes_per_byte(bits: int) -> int:
    return 8 // bits


def pack(
    codes: Integer[Array, "*groups group"] | Integer[np.ndarray, "*groups group"],
    bits: int,
) -> Any:
    """Pack groups of codes below `2**bits`: of JAX, or of NumPy."""
    planes = codes_per_byte(bits)
    size = codes.shape[-1] // planes
    packed = codes[..., :size]
    for plane in range(1, planes):
        part = codes[..., plane * size : (plane + 1) * size]
        packed = packed | (part << np.uint8(plane * bits))
    return packed


def unpack_planes(
    packed: Integer[Array, "*lead packed"], bits: int
) -> Integer[Array, "*lead planes packed"]:
    """The codes in plane order: one shift and one mask per plane."""
    planes = codes_per_byte(bits)
    if planes == 1:
        return packed[..., None, :]
    shifts = jnp.arange(planes, dtype=jnp.uint8) * jnp.uint8(bits)
    return (packed[..., None, :] >> shifts[:, None]) & jnp.uint8(2**bits - 1)


def unpack(
    packed: Integer[Array, "*lead packed"], bits: int, group: int
) -> Integer[Array, "*lead size"]:
    """Inverse of [`pack`][], for groups one after the other."""
    *lead, size = packed.shape
    planes = unpack_planes(packed, bits).reshape(*lead, size * codes_per_byte(bits))
    return from_plane_order(planes, bits, group)


def to_plane_order(
    x: Shaped[Array, "*lead size"], bits: int, group: int
) -> Shaped[Array, "*lead size"]:
    """Permute the last axis from logical order to plane order."""
    planes = codes_per_byte(bits)
    if planes == 1:
        return x
    *lead, size = x.shape
    x = x.reshape(*lead, size // group, planes, group // planes)
    return jnp.swapaxes(x, -3, -2).reshape(*lead, size)


def from_plane_order(
    x: Shaped[Array, "*lead size"], bits: int, group: int
) -> Shaped[Array, "*lead size"]:
    """Inverse of [`to_plane_order`][]."""
    planes = codes_per_byte(bits)
    if planes == 1:
        return x
    *lead, size = x.shape
    x = x.reshape(*lead, planes, size // group, group // planes)
    return jnp.swapaxes(x, -3, -2).reshape(*lead, size)
