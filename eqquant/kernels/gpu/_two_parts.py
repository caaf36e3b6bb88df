"""Codes of 3, 5 and 6 bits, whose high bits are in bytes of their own.

Each group of codes is stored as `run` bytes with the low 2 or 4 bits, in the planes of
such codes, followed by fewer bytes with the high bits. A tile has some low bytes, and
the high byte of each, which is loaded for several low bytes.

Rotating a high byte moves the high bits of all codes of its low byte to the planes of
the low bits. The rotation depends only on the position of the low byte in its group.
Triton decodes in the layout of tensor cores if all operands are loaded, so the
rotations are an array in memory.
"""

import numpy as np
from jaxtyping import Array, Int32, Integer

from ...formats import Format, num_bytes, parts_of, planes_of


def can_join(format: Format) -> bool:
    """Return whether codes in two parts can be joined: each four adjacent low bytes
    need the same rotation, and adjacent high bytes."""
    return high_bytes(format) % 4 == 0


def high_bytes(format: Format) -> int:
    """Return the bytes of a group with high bits."""
    return num_bytes(format.group, parts_of(format.bits)[1])


def rotations(format: Format, size: int) -> Int32[np.ndarray, " bytes"]:
    """Return the bits by which high bytes are rotated to the right, for `size` low
    bytes or one group, whichever is longer."""
    run = format.group // planes_of(format.bits)
    position = np.arange(max(size, run)) % run // high_bytes(format)
    return (position * parts_of(format.bits)[1]).astype(np.int32)


def join(bits: int, plane: int) -> tuple[str, ...]:
    """Return PTX that joins a plane of the low bytes in `s` and of the high bytes in
    `h`, which it rotates by `n`. The codes are then in `s`, below bits of others."""
    low, _ = parts_of(bits)
    ones = 0x01010101
    to_top = low - plane * low
    move = f"{'shl' if to_top > 0 else 'shr'}.{'b' if to_top > 0 else 'u'}32"
    return (
        "shf.r.wrap.b32 h, h, h, n;",
        *([f"{move} h, h, {abs(to_top)};"] if to_top else []),
        *([f"shr.u32 s, s, {plane * low};"] if plane else []),
        # Select bits by the mask.
        f"lop3.b32 s, s, {(2**low - 1) * ones:#010x}, h, 0xe2;",
    )


def joined(
    low: Integer[Array, "*shape"],
    high: Integer[Array, "*shape"],
    rotation: Int32[Array, "*shape"],
    bits: int,
    plane: int,
) -> Integer[Array, "*shape"]:
    """Return the codes of a plane in JAX."""
    low_bits, high_bits = parts_of(bits)
    first = plane * low_bits
    high = (high.astype(np.int32) * 0x101) >> (rotation + first)
    low = low.astype(np.int32) >> first
    return (low & (2**low_bits - 1)) | (high & (2**high_bits - 1)) << low_bits
