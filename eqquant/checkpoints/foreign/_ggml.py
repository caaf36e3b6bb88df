"""The tensor types of GGUF files, and how to unpack their blocks of bytes.

A block holds integers and scales: `value = level * scale` or `level * scale + offset`.
Unpacking multiplies in the order of ggml, so values are equal bit for bit. The layouts
of blocks are in the public headers of ggml.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...formats import (
    Codebook,
    Format,
    Int3,
    Int4,
    Int5,
    Int6,
    Int8,
    MXFP4,
    Ternary,
)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Unpacked blocks.

    **Fields:**

    - `levels`: `(count, block)`, int8, or float32 for FP4.
    - `scales`: `(count, scales)`, float32. Each scale covers an equal part of the
        block.
    - `offsets`: like `scales`, for types with offsets.
    - `codes`: like `levels`, for types with a table of levels: the index of each level.
    """

    levels: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None = None
    codes: np.ndarray | None = None

    def decode(self) -> np.ndarray:
        count, parts = self.scales.shape
        values = self.levels.reshape(count, parts, -1).astype(np.float32)
        # Scales may be infinite or NaN, which is not an error here.
        with np.errstate(invalid="ignore", over="ignore"):
            values *= self.scales[..., None]
            if self.offsets is not None:
                values += self.offsets[..., None]
        return values.reshape(self.levels.shape)


@dataclasses.dataclass(frozen=True)
class Type:
    """A type of tensor.

    **Fields:**

    - `block`, `nbytes`: the number of values and the number of bytes per block.
    - `dtype`: for plain numbers.
    - `unpack`: unpacks the bytes of blocks, `(count, nbytes)`.
    - `format`: the format that stores the blocks exactly.
    """

    name: str
    block: int = 1
    nbytes: int = 1
    dtype: Any = None
    unpack: Callable[[np.ndarray], Blocks] | None = None
    format: Format | None = None


def _split(blocks: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """Split blocks into fields of `sizes` bytes, and the remaining bytes."""
    return np.split(blocks, np.cumsum(sizes), axis=1)


def _halves(raw: np.ndarray) -> np.ndarray:
    """Return float16 bytes as float32."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _fields(raw: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Unpack fields of `bits` bits. In each run of `run` bytes, the lowest fields of
    all bytes come first, then the next fields."""
    count = raw.shape[0]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = (raw.reshape(count, -1, 1, run) >> shifts) & np.uint8(2**bits - 1)
    return fields.reshape(count, -1)


def _q4_0(raw):
    d, q = _split(raw, 2)
    return Blocks(_fields(q, 4, 16).astype(np.int8) - np.int8(8), _halves(d))


def _q4_1(raw):
    d, m, q = _split(raw, 2, 2)
    return Blocks(_fields(q, 4, 16).astype(np.int8), _halves(d), _halves(m))


def _five_bits(high, low):
    bits = np.unpackbits(high, axis=1, bitorder="little")
    return (_fields(low, 4, 16) | bits << np.uint8(4)).astype(np.int8)


def _q5_0(raw):
    d, high, low = _split(raw, 2, 4)
    return Blocks(_five_bits(high, low) - np.int8(16), _halves(d))


def _q5_1(raw):
    d, m, high, low = _split(raw, 2, 2, 4)
    return Blocks(_five_bits(high, low), _halves(d), _halves(m))


def _q8_0(raw):
    d, q = _split(raw, 2)
    return Blocks(q.view(np.int8), _halves(d))


def _q2_k(raw):
    packed, q, d, dmin = _split(raw, 16, 64, 2)
    scales = _halves(d) * (packed & np.uint8(15)).astype(np.float32)
    offsets = -(_halves(dmin) * (packed >> np.uint8(4)).astype(np.float32))
    return Blocks(_fields(q, 2, 32).astype(np.int8), scales, offsets)


def _q3_k(raw):
    high, low, scales, d = _split(raw, 32, 64, 12)
    scales = _fields(scales[:, :8], 4, 8) | _fields(scales[:, 8:], 2, 4) << np.uint8(4)
    scales = scales.astype(np.float32) - np.float32(32)
    levels = _fields(low, 2, 32).astype(np.int8)
    # Subtract 4 where the third bit is not set.
    levels -= ((_fields(high, 1, 32) ^ np.uint8(1)) << np.uint8(2)).astype(np.int8)
    return Blocks(levels, _halves(d) * scales)


def _k_scales_and_offsets(d, dmin, packed):
    """Unpack the scales and offsets of Q4_K and Q5_K: two times eight 6-bit numbers.
    Four numbers of each kind have a byte of their own. The top bits of that byte belong
    to one of the other four numbers."""
    first, second, rest = np.split(packed, 3, axis=1)

    def join(first_four, low_bits):
        high_bits = (first_four >> np.uint8(2)) & np.uint8(0x30)
        joined = np.concatenate([first_four & np.uint8(63), low_bits | high_bits], 1)
        return joined.astype(np.float32)

    scales = _halves(d) * join(first, rest & np.uint8(15))
    return scales, -(_halves(dmin) * join(second, rest >> np.uint8(4)))


def _q4_k(raw):
    d, dmin, packed, q = _split(raw, 2, 2, 12)
    scales, offsets = _k_scales_and_offsets(d, dmin, packed)
    return Blocks(_fields(q, 4, 32).astype(np.int8), scales, offsets)


def _q5_k(raw):
    d, dmin, packed, high, low = _split(raw, 2, 2, 12, 32)
    scales, offsets = _k_scales_and_offsets(d, dmin, packed)
    levels = _fields(low, 4, 32) | _fields(high, 1, 32) << np.uint8(4)
    return Blocks(levels.astype(np.int8), scales, offsets)


def _q6_k(raw):
    low, high, packed, d = _split(raw, 128, 64, 16)
    levels = _fields(low, 4, 64) | _fields(high, 2, 32) << np.uint8(4)
    scales = _halves(d) * packed.view(np.int8).astype(np.float32)
    return Blocks(levels.astype(np.int8) - np.int8(32), scales)


def _tq1_0(raw):
    """Unpack five ternary digits per byte, stored as a fraction of 256. The last four
    bytes hold four digits each."""
    first, second, rest, d = _split(raw, 32, 16, 4)

    def digits(part, count):
        powers = np.uint8(3) ** np.arange(count, dtype=np.uint8)[:, None]
        shifted = part[:, None, :] * powers  # Drops earlier digits: uint8 wraps.
        return ((shifted.astype(np.uint16) * 3) >> 8).reshape(len(part), -1)

    levels = np.concatenate([digits(first, 5), digits(second, 5), digits(rest, 4)], 1)
    return Blocks(levels.astype(np.int8) - np.int8(1), _halves(d))


def _tq2_0(raw):
    q, d = _split(raw, 64)
    return Blocks(_fields(q, 2, 32).astype(np.int8) - np.int8(1), _halves(d))


# The levels of IQ4_NL and IQ4_XS, and of FP4 (e2m1).
_iq4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_iq4_levels = np.array(_iq4, np.int8)
_fp4_levels = np.array(MXFP4.codebook, np.float32)


def _iq4_nl(raw):
    d, q = _split(raw, 2)
    codes = _fields(q, 4, 16)
    return Blocks(_iq4_levels[codes], _halves(d), codes=codes)


def _iq4_xs(raw):
    d, high, low, q = _split(raw, 2, 2, 4)
    scales = _fields(low, 4, 1) | _fields(high, 2, 1) << np.uint8(4)
    scales = scales.astype(np.float32) - np.float32(32)
    codes = _fields(q, 4, 16)
    return Blocks(_iq4_levels[codes], _halves(d) * scales, codes=codes)


def _mxfp4(raw):
    exponents, q = _split(raw, 1)
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    codes = _fields(q, 4, 16)
    codes[codes == 8] = 0  # ggml decodes -0 to 0.
    return Blocks(_fp4_levels[codes], scales.astype(np.float32), codes=codes)


_affine: Any = {"scale_dtype": "float16", "affine": True, "unsigned": True}
_q4_1_format, _q5_1_format = Int4(32, **_affine), Int5(32, **_affine)
_ternary = Ternary(block_size=256, scale_dtype="float16")
_iq4_nl_format = Codebook(_iq4, block_size=32, scale_dtype="float16")

# The types by their number in files.
TYPES: dict[int, Type] = {
    0: Type("F32", nbytes=4, dtype=np.dtype("<f4")),
    1: Type("F16", nbytes=2, dtype=np.dtype("<f2")),
    2: Type("Q4_0", 32, 18, unpack=_q4_0, format=Int4(32, "float16")),
    3: Type("Q4_1", 32, 20, unpack=_q4_1, format=_q4_1_format),
    6: Type("Q5_0", 32, 22, unpack=_q5_0, format=Int5(32, "float16")),
    7: Type("Q5_1", 32, 24, unpack=_q5_1, format=_q5_1_format),
    8: Type("Q8_0", 32, 34, unpack=_q8_0, format=Int8(32, "float16")),
    10: Type("Q2_K", 256, 84, unpack=_q2_k),
    11: Type("Q3_K", 256, 110, unpack=_q3_k, format=Int3(16, "float32")),
    12: Type("Q4_K", 256, 144, unpack=_q4_k),
    13: Type("Q5_K", 256, 176, unpack=_q5_k),
    14: Type("Q6_K", 256, 210, unpack=_q6_k, format=Int6(16)),
    16: Type("IQ2_XXS", 256, 66),
    17: Type("IQ2_XS", 256, 74),
    18: Type("IQ3_XXS", 256, 98),
    19: Type("IQ1_S", 256, 50),
    20: Type("IQ4_NL", 32, 18, unpack=_iq4_nl, format=_iq4_nl_format),
    21: Type("IQ3_S", 256, 110),
    22: Type("IQ2_S", 256, 82),
    23: Type("IQ4_XS", 256, 136, unpack=_iq4_xs, format=Codebook(_iq4, 32)),
    24: Type("I8", nbytes=1, dtype=np.dtype("i1")),
    25: Type("I16", nbytes=2, dtype=np.dtype("<i2")),
    26: Type("I32", nbytes=4, dtype=np.dtype("<i4")),
    27: Type("I64", nbytes=8, dtype=np.dtype("<i8")),
    28: Type("F64", nbytes=8, dtype=np.dtype("<f8")),
    29: Type("IQ1_M", 256, 56),
    30: Type("BF16", nbytes=2, dtype=np.dtype(jnp.bfloat16)),
    34: Type("TQ1_0", 256, 54, unpack=_tq1_0, format=_ternary),
    35: Type("TQ2_0", 256, 66, unpack=_tq2_0, format=_ternary),
    39: Type("MXFP4", 32, 17, unpack=_mxfp4, format=MXFP4()),
    40: Type("NVFP4", 64, 36),
    41: Type("Q1_0", 128, 18),
}
