"""The tensor types of GGUF files, and how to unpack their blocks of bytes.

A block holds codes and scales: `value = level * scale` or `level * scale + offset`. A
table gives the level of each code. A scale is a float, or an integer times a float.
Decoding multiplies in the order of ggml, so values are equal bit for bit. The layouts
of blocks are in the public headers of ggml.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...formats import (
    Codebook,
    DenseTernary,
    Format,
    Int2,
    Int3,
    Int4,
    Int5,
    Int6,
    Int8,
    MXFP4,
    Ternary,
)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The scales or offsets of blocks.

    **Fields:**

    - `units`: `(count, 1)`, float16, or uint8 exponents of two with a bias of 127.
    - `integers`: `(count, parts)`. They and `lowest` add up to factors of `units`. Each
        belongs to an equal part of the block.
    - `sign`: 1, or -1 for minima, which ggml subtracts.
    """

    units: np.ndarray
    integers: np.ndarray | None = None
    lowest: int = 0
    sign: int = 1

    def rows(self, start: int, stop: int) -> "Numbers":
        integers = None if self.integers is None else self.integers[start:stop]
        return dataclasses.replace(
            self, units=self.units[start:stop], integers=integers
        )

    @property
    def factors(self) -> np.ndarray:
        assert self.integers is not None
        return self.integers + self.integers.dtype.type(self.lowest)

    @property
    def signed_units(self) -> np.ndarray:
        return self.units if self.sign > 0 else -self.units

    def decode(self) -> np.ndarray:
        """Return `(count, parts)`, float32."""
        if self.units.dtype == np.uint8:
            exponents = self.units.astype(np.int32) - 127
            return np.ldexp(np.float32(1), exponents).astype(np.float32)
        units = self.signed_units.astype(np.float32)
        if self.integers is None:
            return units
        # Units may be infinite or NaN, which is not an error here.
        with np.errstate(invalid="ignore"):
            return units * self.factors.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Unpacked blocks.

    **Fields:**

    - `codes`: `(count, block)`, uint8.
    - `offsets`: like `scales`, for types with offsets.
    - `bits`: if it is not 8, the codes are still packed, in the layout of
        `formats/_pack.py` with one group per block.
    """

    codes: np.ndarray
    scales: Numbers
    offsets: Numbers | None = None
    bits: int = 8

    def unpacked(self) -> np.ndarray:
        if self.bits == 8:
            return self.codes
        return _fields(self.codes, self.bits, self.codes.shape[-1])


@dataclasses.dataclass(frozen=True)
class Type:
    """A type of tensor.

    **Fields:**

    - `block`, `nbytes`: the number of values and the number of bytes per block.
    - `dtype`: for plain numbers.
    - `unpack`: unpacks the bytes of blocks, `(count, nbytes)`.
    - `levels`: the level of each code.
    - `format`: the format that stores the blocks exactly.
    """

    name: str
    block: int = 1
    nbytes: int = 1
    dtype: Any = None
    unpack: Callable[[np.ndarray], Blocks] | None = None
    levels: np.ndarray | None = None
    format: Format | None = None

    def decode(self, blocks: Blocks) -> np.ndarray:
        """Return `(count, block)`, float32."""
        assert self.levels is not None
        scales = blocks.scales.decode()
        count, parts = scales.shape
        values = self.levels.astype(np.float32)[blocks.unpacked()]
        values = values.reshape(count, parts, -1)
        with np.errstate(invalid="ignore", over="ignore"):
            values *= scales[..., None]
            if blocks.offsets is not None:
                values += blocks.offsets.decode()[..., None]
        return values.reshape(count, -1)


def _split(blocks: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """Split blocks into fields of `sizes` bytes, and the remaining bytes."""
    return np.split(blocks, np.cumsum(sizes), axis=1)


def _halves(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view("<f2")


def _fields(raw: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Unpack fields of `bits` bits. In each run of `run` bytes, the lowest fields of
    all bytes come first, then the next fields."""
    count = raw.shape[0]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = (raw.reshape(count, -1, 1, run) >> shifts) & np.uint8(2**bits - 1)
    return fields.reshape(count, -1)


def _q4_0(raw):
    d, q = _split(raw, 2)
    return Blocks(q, Numbers(_halves(d)), bits=4)


def _q4_1(raw):
    d, m, q = _split(raw, 2, 2)
    return Blocks(q, Numbers(_halves(d)), Numbers(_halves(m)), bits=4)


def _five_bits(high, low):
    bits = np.unpackbits(high, axis=1, bitorder="little")
    return _fields(low, 4, 16) | bits << np.uint8(4)


def _q5_0(raw):
    d, high, low = _split(raw, 2, 4)
    return Blocks(_five_bits(high, low), Numbers(_halves(d)))


def _q5_1(raw):
    d, m, high, low = _split(raw, 2, 2, 4)
    numbers = Numbers(_halves(d)), Numbers(_halves(m))
    return Blocks(_five_bits(high, low), *numbers)


def _q8_0(raw):
    d, q = _split(raw, 2)
    return Blocks(q, Numbers(_halves(d)))


def _q2_k(raw):
    packed, q, d, dmin = _split(raw, 16, 64, 2)
    scales = Numbers(_halves(d), packed & np.uint8(15))
    offsets = Numbers(_halves(dmin), packed >> np.uint8(4), sign=-1)
    return Blocks(_fields(q, 2, 32), scales, offsets)


def _q3_k(raw):
    high, low, scales, d = _split(raw, 32, 64, 12)
    scales = _fields(scales[:, :8], 4, 8) | _fields(scales[:, 8:], 2, 4) << np.uint8(4)
    codes = _fields(low, 2, 32) | _fields(high, 1, 32) << np.uint8(2)
    return Blocks(codes, Numbers(_halves(d), scales.view(np.int8), -32))


def _k_scales_and_offsets(d, dmin, packed):
    """Unpack the scales and offsets of Q4_K and Q5_K: two times eight 6-bit numbers.
    Four numbers of each kind have a byte of their own. The top bits of that byte belong
    to one of the other four numbers."""
    first, second, rest = np.split(packed, 3, axis=1)

    def join(first_four, low_bits):
        high_bits = (first_four >> np.uint8(2)) & np.uint8(0x30)
        return np.concatenate([first_four & np.uint8(63), low_bits | high_bits], 1)

    scales = Numbers(_halves(d), join(first, rest & np.uint8(15)))
    return scales, Numbers(_halves(dmin), join(second, rest >> np.uint8(4)), sign=-1)


def _q4_k(raw):
    d, dmin, packed, q = _split(raw, 2, 2, 12)
    return Blocks(_fields(q, 4, 32), *_k_scales_and_offsets(d, dmin, packed))


def _q5_k(raw):
    d, dmin, packed, high, low = _split(raw, 2, 2, 12, 32)
    codes = _fields(low, 4, 32) | _fields(high, 1, 32) << np.uint8(4)
    return Blocks(codes, *_k_scales_and_offsets(d, dmin, packed))


def _q6_k(raw):
    low, high, packed, d = _split(raw, 128, 64, 16)
    codes = _fields(low, 4, 64) | _fields(high, 2, 32) << np.uint8(4)
    return Blocks(codes, Numbers(_halves(d), packed.view(np.int8)))


def _tq1_0(raw):
    """Unpack five ternary digits per byte, stored as a fraction of 256. The last four
    bytes hold four digits each."""
    first, second, rest, d = _split(raw, 32, 16, 4)

    def digits(part, count):
        powers = np.uint8(3) ** np.arange(count, dtype=np.uint8)[:, None]
        shifted = part[:, None, :] * powers  # Drops earlier digits: uint8 wraps.
        digit = (shifted.astype(np.uint16) * 3) >> 8
        return digit.astype(np.uint8).reshape(len(part), -1)

    codes = np.concatenate([digits(first, 5), digits(second, 5), digits(rest, 4)], 1)
    return Blocks(codes, Numbers(_halves(d)))


def _tq2_0(raw):
    q, d = _split(raw, 64)
    return Blocks(_fields(q, 2, 32), Numbers(_halves(d)))


def _iq4_xs(raw):
    d, high, low, q = _split(raw, 2, 2, 4)
    scales = _fields(low, 4, 1) | _fields(high, 2, 1) << np.uint8(4)
    return Blocks(_fields(q, 4, 16), Numbers(_halves(d), scales.view(np.int8), -32))


def _mxfp4(raw):
    exponents, q = _split(raw, 1)
    return Blocks(q, Numbers(exponents), bits=4)


# The levels of IQ4_NL and IQ4_XS, and of FP4 (e2m1).
_iq4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_iq4_levels = np.array(_iq4, np.int8)
_fp4_levels = np.array(MXFP4.codebook, np.float32) + 0  # ggml decodes -0 to 0.
_bytes = np.arange(256, dtype=np.uint8).view(np.int8)


def _integers(count: int, lowest: int = 0) -> np.ndarray:
    return np.arange(lowest, lowest + count, dtype=np.int8)


_with_minimum: dict[str, Any] = {"affine": True, "unsigned": True}
_k: dict[str, Any] = {"double_quantization": "k"}
_k_with_minimum = {**_with_minimum, **_k}


def _codebook(**options: Any) -> Codebook:
    return Codebook(_iq4, 32, **options)


def _plain(name: str, dtype: Any) -> Type:
    return Type(name, nbytes=np.dtype(dtype).itemsize, dtype=np.dtype(dtype))


# The types by their number in files.
TYPES: dict[int, Type] = {
    0: _plain("F32", "<f4"),
    1: _plain("F16", "<f2"),
    2: Type("Q4_0", 32, 18, None, _q4_0, _integers(16, -8), Int4(32, "float16")),
    3: Type(
        *("Q4_1", 32, 20, None, _q4_1, _integers(16)),
        Int4(32, "float16", **_with_minimum),
    ),
    6: Type("Q5_0", 32, 22, None, _q5_0, _integers(32, -16), Int5(32, "float16")),
    7: Type(
        *("Q5_1", 32, 24, None, _q5_1, _integers(32)),
        Int5(32, "float16", **_with_minimum),
    ),
    8: Type("Q8_0", 32, 34, None, _q8_0, _bytes, Int8(32, "float16")),
    10: Type("Q2_K", 256, 84, None, _q2_k, _integers(4), Int2(16, **_k_with_minimum)),
    11: Type("Q3_K", 256, 110, None, _q3_k, _integers(8, -4), Int3(16, **_k)),
    12: Type("Q4_K", 256, 144, None, _q4_k, _integers(16), Int4(32, **_k_with_minimum)),
    13: Type("Q5_K", 256, 176, None, _q5_k, _integers(32), Int5(32, **_k_with_minimum)),
    14: Type("Q6_K", 256, 210, None, _q6_k, _integers(64, -32), Int6(16, **_k)),
    16: Type("IQ2_XXS", 256, 66),
    17: Type("IQ2_XS", 256, 74),
    18: Type("IQ3_XXS", 256, 98),
    19: Type("IQ1_S", 256, 50),
    20: Type(
        "IQ4_NL", 32, 18, None, _q4_0, _iq4_levels, _codebook(scale_dtype="float16")
    ),
    21: Type("IQ3_S", 256, 110),
    22: Type("IQ2_S", 256, 82),
    23: Type("IQ4_XS", 256, 136, None, _iq4_xs, _iq4_levels, _codebook(**_k)),
    24: _plain("I8", "i1"),
    25: _plain("I16", "<i2"),
    26: _plain("I32", "<i4"),
    27: _plain("I64", "<i8"),
    28: _plain("F64", "<f8"),
    29: Type("IQ1_M", 256, 56),
    30: _plain("BF16", jnp.bfloat16),
    34: Type("TQ1_0", 256, 54, None, _tq1_0, _integers(3, -1), DenseTernary()),
    35: Type(
        *("TQ2_0", 256, 66, None, _tq2_0, _integers(4, -1)), Ternary(256, "float16")
    ),
    39: Type("MXFP4", 32, 17, None, _mxfp4, _fp4_levels, MXFP4()),
    40: Type("NVFP4", 64, 36),
    41: Type("Q1_0", 128, 18),
}
