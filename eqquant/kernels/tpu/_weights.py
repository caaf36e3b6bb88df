"""Decode packed codes to the bytes that the matrix unit multiplies: int8 or float8.

Integer codes take a mask and a shift per 32 bits. Codebooks take one hardware lookup
per digit. Decoded numbers are a multiple of the levels; the scales make up for the
factor. `_bits.py` has the kinds for single bits.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped

from ...formats import Format
from ._bits import Bits
from ._chips import Chip, Kind
from ._circuit import Circuit, circuit_of
from ._history import indices as indices_by_history, table_of
from ._tiles import bits_of, lanes, look_up, planes_of


def _mask(byte: int) -> Array:
    """Return a word that repeats the byte four times."""
    return jnp.uint32(byte * 0x01010101)


def _shift_left(codes, shift: int) -> Array:
    """Shift the words that hold four bytes each. Bits cross from byte to byte."""
    words = pltpu.bitcast(codes, jnp.uint32)
    return words << shift if shift else words


def _signed_top_bits(codes, plane: int, format: Format):
    """Decode codes whose top bit is a sign, by moving them to the top of the byte. The
    next bit, 64, is the magnitude 1. As a float8 that is a power of two."""
    words = _shift_left(codes, 8 - format.bits * (plane + 1))
    if format.bits == 1:
        words = (words & _mask(0x80)) | _mask(0x40)
    else:
        words = words & _mask(0xC0)
    return pltpu.bitcast(words, jnp.int8)


def _unchanged(codes, plane: int, format: Format):
    return codes


def _integers(codes, plane: int, format: Format):
    """Decode offset binary integers to two's complement, at the top of the byte."""
    words = _shift_left(codes, 8 - bits_of(format) * (plane + 1))
    top = (2**format.bits - 1) << (8 - format.bits)
    return pltpu.bitcast((words & _mask(top)) ^ _mask(0x80), jnp.int8)


def _float8(codes, plane: int, format: Format):
    """Decode E4M3. Chips interpret the same bits as the same numbers, up to a factor.

    Negative zero may be NaN on a chip, and out-of-bounds bytes are undefined. This
    replaces both by finite numbers.
    """
    words = pltpu.bitcast(codes, jnp.uint32)
    size = words & _mask(0x7F)
    sign = (size + _mask(0x7F)) & words & _mask(0x80)
    is_nan = ((size + _mask(1)) & _mask(0x80)) >> 1
    return pltpu.bitcast(sign | (size & ~is_nan), jnp.int8)


def _indices(codes, plane: int, format: Format):
    """Return the codes of a plane as bytes."""
    words = pltpu.bitcast(codes, jnp.uint32)
    shift = bits_of(format) * (plane + 1) - format.bits
    words = (words >> shift if shift else words) & _mask(2**format.bits - 1)
    return pltpu.bitcast(words, jnp.int8)


def _lookup(table, indices, axis: int):
    """Look up a tile of codes, one register at a time."""
    rows, columns = indices.shape

    def tile(i, j):
        index = indices[i : i + 32, j : j + lanes]
        entries = table if axis else table[:, : index.shape[1]]
        return look_up(entries, index, axis)

    return jnp.concatenate(
        [
            jnp.concatenate([tile(i, j) for j in range(0, columns, lanes)], 1)
            for i in range(0, rows, 32)
        ],
        0,
    )


def _by_logic(circuit: Circuit, codes) -> list[Shaped[Array, "rows bytes"]]:
    """Return the decoded bytes of each plane of `codes`, or no planes if `codes` has no
    rows. The number of rows is a multiple of 128."""
    if not codes.shape[0]:
        return []

    def column(j: int) -> list:
        planes = [], []
        for i in range(0, codes.shape[0], 128):
            parts = [codes[i + r : i + r + 32, j : j + lanes] for r in (0, 32, 64, 96)]
            for plane, decoded in zip(planes, circuit.decode(parts), strict=True):
                plane.extend(decoded)
        return [jnp.concatenate(plane) for plane in planes]

    columns = [column(j) for j in range(0, codes.shape[1], lanes)]
    return [jnp.concatenate(plane, 1) for plane in zip(*columns, strict=True)]


# The function that decodes a format, the kinds of numbers that its bytes are, and the
# byte of the number 1.
_Decoding = tuple[Callable, tuple[Kind, ...], int]
_decodings: dict[str, _Decoding] = {
    "int8": (_unchanged, ("int8",), 1),
    "int6": (_integers, ("int8",), 0x04),
    "int5": (_integers, ("int8",), 0x08),
    "int4": (_integers, ("int8", "float8"), 0x10),
    "int3": (_integers, ("int8", "float8"), 0x20),
    "int2": (_integers, ("int8", "float8"), 0x40),
    "ternary": (_signed_top_bits, ("int8", "float8"), 0x40),
    "binary": (
        _signed_top_bits,
        ("int8", "float8", "bits of float8", "bits of int4"),
        0x40,
    ),
}
_by_lookup: _Decoding = (_indices, ("int8", "float8"), 0)
_by_history: _Decoding = (_indices, ("int8",), 0)
_from_float8: _Decoding = (_float8, ("float8",), 0x38)


def _decoding_of(format: Format, lookup: bool = True) -> _Decoding | None:
    if format.history:
        return _by_history if lookup and format.linear_table else None
    if format.codebook is not None:
        return _by_lookup if lookup and _has_table(format) else None
    if format.float8 == "e4m3fn":
        return _from_float8
    return _decodings.get(format.name) if format.integer_levels else None


def _has_table(format: Format) -> bool:
    return type(format).levels is Format.levels and any(format.codebook or ())


def can_become(kind: Kind, format: Format, chip: Chip) -> bool:
    """Return whether codes can be decoded to a kind of number on this chip."""
    if kind in ("float8", "bits of float8") and chip.float8 is None:
        return False
    decoding = _decoding_of(format, chip.options.lookup)
    return decoding is not None and kind in decoding[1]


def is_shifted(format: Format) -> bool:
    """Return whether a shift decodes to int8, whereas float8 takes a lookup."""
    decoding = _decoding_of(format)
    return decoding is not None and decoding[0] is _integers


def is_exact(format: Format) -> bool:
    """Return whether the levels of a table are multiples of int8 numbers, so that one
    digit is exact."""
    if format.history:
        return True
    if format.codebook is None or not _has_table(format):
        return False
    levels = tuple(format.codebook)
    (table,), scale = _int8_digits(levels, 1)
    return bool(np.max(np.abs(table / scale - _normalized(levels))) < 1e-7)


def _normalized(levels: tuple[float, ...]) -> np.ndarray:
    """Return the levels with a largest magnitude of 1."""
    return np.array(levels) / np.max(np.abs(levels))


class Decoder:
    """Decode a tile of codes to the operands of the matrix unit.

    An operand has the codes of one plane, or of two planes whose rows alternate. If the
    format has a codebook, each operand has `digits` digits.

    - `dtype`: the dtype of the operands.
    - `planes`: the planes of each operand.
    - `powers`: the value of 1 in each operand, relative to the others.
    - `base`: the value of a digit, relative to the next digit.
    - `offset`, `scale`: a level is `(number + offset) * scale`.
    """

    def __init__(
        self, format: Format, chip: Chip, kind: Kind, digits: int, logic: bool = False
    ):
        self.format, self.chip = format, chip
        integers = {"int8": jnp.int8, "bits of int4": jnp.int4}
        self.dtype = integers.get(kind, chip.float8)
        self.base, self.scale, self.offset = 1, 1.0, 0.0
        self._entries: list[np.ndarray] = []
        self._circuit = None
        decoding = _decoding_of(format)
        assert decoding is not None
        self._extract, _, byte_of_one = decoding
        self.planes = [(plane,) for plane in range(planes_of(format))]
        self.powers = [1.0] * len(self.planes)
        levels = tuple(format.codebook or ())
        if kind in ("bits of float8", "bits of int4"):
            self._extract = bits = Bits(kind, self.dtype)
            self.planes = [shift.planes for shift in bits.shifts]
            self.powers = bits.powers
            self.scale, self.offset = -2 / bits.smallest, -bits.smallest / 2
            return
        if is_shifted(format) and kind == "float8":
            half = 2 ** (format.bits - 1)
            self._extract, levels = _indices, tuple(map(float, range(-half, half)))
        if levels:
            if kind == "int8":
                tables, scale, self.base = *_int8_digits(levels, digits), _base
            else:
                tables, scale = _float8_digits(levels, np.dtype(chip.float8), digits)
            self.scale = float(np.max(np.abs(levels))) / scale
            self._entries = tables
            if logic and kind == "int8" and len(tables) == 1:
                self._circuit = circuit_of(tuple(map(int, tables[0])))
        elif format.history:
            self._entries = [table_of(format)]
        else:
            # The float8 dtypes of chips differ by a factor.
            one = np.array([byte_of_one], np.uint8).view(np.dtype(self.dtype))[0]
            self.scale = 1 / float(one)

    @property
    def num_tables(self) -> int:
        return len(self._entries)

    def tables(self) -> list:
        """Return the tables in registers, in a kernel."""
        return [_make_table(entries, self._axis) for entries in self._entries]

    @property
    def _axis(self) -> int:
        """The axis of lookups. Sublanes hold 32 entries, lanes 128."""
        return 1 if any(len(t) > 32 for t in self._entries) else self.chip.gather_axis

    def prepare(self, codes: Shaped[Array, "rows bytes"], axis: int = 1) -> Any:
        """Return the operand of `__call__` for a tile of codes: table indices for a
        history, otherwise the codes. Bytes of a row are along `axis`."""
        if self.format.history:
            return indices_by_history(codes, self.format, axis)
        return codes

    def __call__(
        self, codes: Any, tables: list
    ) -> list[list[Shaped[Array, "some bytes"]]]:
        """Return the digits of each operand of a tile, the highest digit first."""
        if self.format.history:
            return [[_lookup(tables[0], index, self._axis)] for index in codes]
        # Logic decodes the last quarter of the rows, four registers at a time.
        looked_up = codes.shape[0]
        by_logic = []
        if self._circuit:
            looked_up -= codes.shape[0] // 512 * 128
            by_logic = _by_logic(self._circuit, codes[looked_up:])
        operands = []
        for i in range(len(self.planes)):
            extracted = self._extract(codes[:looked_up], i, self.format)
            digits = [_lookup(table, extracted, self._axis) for table in tables]
            digits = digits if tables else [extracted]
            if self.dtype != jnp.int8:
                digits = [pltpu.bitcast(digit, self.dtype) for digit in digits]
            if by_logic:
                digits = [jnp.concatenate([*digits, by_logic[i]])]
            operands.append(digits)
        return operands

    def combine(self, digits: list) -> Array:
        """Combine digits, or products with digits, to numbers."""
        total, *rest = digits
        for digit in rest:
            total = (total * self.base if self.base > 1 else total) + digit
        return total


_base = 256


@ft.cache
def _int8_digits(
    levels: tuple[float, ...], digits: int
) -> tuple[list[np.ndarray], float]:
    """Round a codebook to int8, and the error to 1/256 steps in a second digit. Return
    the digits and the factor by which 1 is scaled."""
    table = _normalized(levels)
    if digits == 1:
        # A smaller scale may round the levels better than 127.
        scales = np.linspace(120, 127, 1401)
    else:
        scales = np.array([127.0])
    errors = [np.sum((np.round(table * s) / s - table) ** 2) for s in scales]
    scale = float(scales[np.argmin(errors)])
    high = np.round(table * scale)
    low = np.clip(np.round((table * scale - high) * _base), -127, 127)
    parts = [part.astype(np.int8) for part in (high, low)[:digits]]
    return parts, scale * _base ** (digits - 1)


@ft.cache
def _float8_digits(
    levels: tuple[float, ...], dtype: np.dtype, digits: int
) -> tuple[list[np.ndarray], float]:
    """Round a codebook to float8, and the error to a second digit. Return the bytes of
    the digits and the factor by which 1 is scaled."""
    table = _normalized(levels)

    def rounded(scale) -> list[np.ndarray]:
        residual, out = table * scale, []
        for _ in range(digits):
            out.append(residual.astype(dtype))
            residual = residual - out[-1].astype(np.float64)
        return out

    def error(scale) -> float:
        total = sum(digit.astype(np.float64) for digit in rounded(scale))
        return float(np.sum((total / scale - table) ** 2))

    # Rounding errors repeat in every octave of scales.
    scale = min(np.linspace(8, 16, 2001), key=error)
    return [digit.view(np.int8) for digit in rounded(scale)], float(scale)


def _make_table(entries: np.ndarray, axis: int) -> Array:
    """Return a table in a register, in a kernel. Entries are along the axis of the
    hardware's lookup."""
    index = lax.broadcasted_iota(jnp.int32, (32, lanes), axis)
    table = jnp.zeros((32, lanes), jnp.int32)
    for i, entry in enumerate(entries):
        table = jnp.where(index == i, jnp.int32(entry), table)
    return table.astype(jnp.int8)
