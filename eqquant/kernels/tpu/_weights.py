"""From codes to what the matrix unit multiplies: int8, or floats of 8 bits.

By a mask and a shift for 32 bits of codes, or by one lookup in hardware for each digit
of a codebook. What one is worth is left to the scales. Single bits: see `_bits.py`.
"""

import functools as ft
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped

from ...formats import Format
from ._bits import Bits
from ._chips import Chip, Kind
from ._circuit import Circuit, circuit_of
from ._tiles import bits_of, lanes, look_up, planes_of


def _mask(byte: int) -> Array:
    """The same byte four times."""
    return jnp.uint32(byte * 0x01010101)


def _signed_top_bits(codes, plane: int, format: Format):
    """Codes with their sign in the top bit, moved to the top of the byte. The next bit
    says that it is not zero: 64 is one. As a float that is a power of two."""
    shift = 8 - format.bits * (plane + 1)
    words = pltpu.bitcast(codes, jnp.uint32)
    words = words << shift if shift else words
    if format.bits == 1:
        words = (words & _mask(0x80)) | _mask(0x40)
    else:
        words = words & _mask(0xC0)
    return pltpu.bitcast(words, jnp.int8)


def _as_they_are(codes, plane: int, format: Format):
    return codes


def _integers(codes, plane: int, format: Format):
    """Codes that are integers plus the magnitude of the lowest, at the top of the byte,
    whose sign they then have."""
    shift = 8 - bits_of(format) * (plane + 1)
    words = pltpu.bitcast(codes, jnp.uint32)
    words = words << shift if shift else words
    top = (2**format.bits - 1) << (8 - format.bits)
    return pltpu.bitcast((words & _mask(top)) ^ _mask(0x80), jnp.int8)


def _float8(codes, plane: int, format: Format):
    """E4M3, whose codes stand for the same numbers on every chip that has such floats,
    but for a factor. Zero with a sign may stand for NaN there, and what lies beyond an
    array is anything: neither is left."""
    words = pltpu.bitcast(codes, jnp.uint32)
    size = words & _mask(0x7F)
    sign = (size + _mask(0x7F)) & words & _mask(0x80)
    is_nan = ((size + _mask(1)) & _mask(0x80)) >> 1
    return pltpu.bitcast(sign | (size & ~is_nan), jnp.int8)


def _indices(codes, plane: int, format: Format):
    words = pltpu.bitcast(codes, jnp.uint32)
    shift = bits_of(format) * (plane + 1) - format.bits
    words = (words >> shift if shift else words) & _mask(2**format.bits - 1)
    return pltpu.bitcast(words, jnp.int8)


def _lookup(table, indices, chip: Chip):
    rows, columns = indices.shape

    def tile(i, j):
        index = indices[i : i + 32, j : j + lanes]
        entries = table if chip.gather_axis else table[:, : index.shape[1]]
        return look_up(entries, index, chip.gather_axis)

    return jnp.concatenate(
        [
            jnp.concatenate([tile(i, j) for j in range(0, columns, lanes)], 1)
            for i in range(0, rows, 32)
        ],
        0,
    )


def _by_logic(circuit: Circuit, codes) -> list[Shaped[Array, "rows bytes"]]:
    """The bytes of both planes, of a multiple of 128 rows; of none, nothing."""
    if not codes.shape[0]:
        return []

    def column(j: int) -> list:
        both = [], []
        for i in range(0, codes.shape[0], 128):
            parts = [codes[i + r : i + r + 32, j : j + lanes] for r in (0, 32, 64, 96)]
            for plane, decoded in zip(both, circuit.decode(parts), strict=True):
                plane.extend(decoded)
        return [jnp.concatenate(plane) for plane in both]

    columns = [column(j) for j in range(0, codes.shape[1], lanes)]
    return [jnp.concatenate(plane, 1) for plane in zip(*columns, strict=True)]


# How a format becomes bytes, which kinds of number these are, and the byte of one.
_Way = tuple[Callable, tuple[Kind, ...], int]
_to_bytes: dict[str, _Way] = {
    "int8": (_as_they_are, ("int8",), 1),
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
_looked_up: _Way = (_indices, ("int8", "float8"), 0)
_as_floats: _Way = (_float8, ("float8",), 0x38)


def _way_of(format: Format, lookup: bool = True) -> _Way | None:
    if format.codebook is not None:
        return _looked_up if lookup and _has_table(format) else None
    if format.float8 == "e4m3fn":
        return _as_floats
    return _to_bytes.get(format.name) if format.integer_levels else None


def _has_table(format: Format) -> bool:
    return type(format).levels is Format.levels and any(format.codebook or ())


def can_become(kind: Kind, format: Format, chip: Chip) -> bool:
    """Whether the codes of a format become such bytes, on this chip."""
    if kind in ("float8", "bits of float8") and chip.float8 is None:
        return False
    way = _way_of(format, chip.options.lookup)
    return way is not None and kind in way[1]


def is_shifted(format: Format) -> bool:
    """Whether a shift makes int8 of the codes, but only a lookup floats."""
    way = _way_of(format)
    return way is not None and way[0] is _integers


def is_exact(format: Format) -> bool:
    """Whether a codebook is one of integers, to be looked up once."""
    if format.codebook is None or not _has_table(format):
        return False
    levels = tuple(format.codebook)
    (table,), scale = _int8_digits(levels, 1)
    return bool(np.max(np.abs(table / scale - _normalized(levels))) < 1e-7)


def _normalized(levels: tuple[float, ...]) -> np.ndarray:
    """With 1 as the largest magnitude."""
    return np.array(levels) / np.max(np.abs(levels))


class Decoder:
    """Codes of a format to operands, one for each plane or two: of so many digits, if
    it has a codebook."""

    def __init__(
        self,
        format: Format,
        chip: Chip,
        kind: Kind,
        digits: int,
        logic: bool = False,
    ):
        self.format, self.chip = format, chip
        integers = {"int8": jnp.int8, "bits of int4": jnp.int4}
        self.dtype = integers.get(kind, chip.float8)
        # What a digit is worth, relative to the next, and what the last is worth.
        self.base, self.unit = 1, 1.0
        self._entries: list[np.ndarray] = []
        self._circuit = None
        way = _way_of(format)
        assert way is not None
        self._prepare, _, one = way
        # For each operand: which planes it has, whose rows take turns, and what its
        # numbers are worth beside those of the others. What is added to every number.
        self.planes = [(plane,) for plane in range(planes_of(format))]
        self.powers = [1.0] * len(self.planes)
        self.offset = 0.0
        levels = tuple(format.codebook or ())
        if kind in ("bits of float8", "bits of int4"):
            self._prepare = bits = Bits(kind, self.dtype)
            self.planes = [place.planes for place in bits.places]
            self.powers = bits.powers
            self.unit, self.offset = -2 / bits.one, -bits.one / 2
            return
        if is_shifted(format) and kind == "float8":
            half = 2 ** (format.bits - 1)
            self._prepare, levels = _indices, tuple(map(float, range(-half, half)))
        if levels:
            if kind == "int8":
                tables, scale, self.base = *_int8_digits(levels, digits), _base
            else:
                tables, scale = _float8_digits(levels, np.dtype(chip.float8), digits)
            self.unit = float(np.max(np.abs(levels))) / scale
            self._entries = tables
            if logic and kind == "int8" and len(tables) == 1:
                self._circuit = circuit_of(tuple(map(int, tables[0])))
        else:
            # The byte of a float may be worth something else on this chip.
            of_chip = np.array([one], np.uint8).view(np.dtype(self.dtype))[0]
            self.unit = 1 / float(of_chip)

    @property
    def num_tables(self) -> int:
        return len(self._entries)

    def tables(self) -> list:
        """In a kernel: what to look up."""
        return [_make_table(entries, self.chip) for entries in self._entries]

    def __call__(
        self, codes: Shaped[Array, "rows bytes"], tables: list
    ) -> list[list[Shaped[Array, "some bytes"]]]:
        """The operands of a tile: of each the digits, the highest first."""
        # The last quarter of the rows, in fours of registers.
        looked_up = codes.shape[0]
        by_logic = []
        if self._circuit:
            looked_up -= codes.shape[0] // 512 * 128
            by_logic = _by_logic(self._circuit, codes[looked_up:])
        operands = []
        for i in range(len(self.planes)):
            prepared = self._prepare(codes[:looked_up], i, self.format)
            digits = [_lookup(table, prepared, self.chip) for table in tables]
            digits = digits if tables else [prepared]
            if self.dtype != jnp.int8:
                digits = [pltpu.bitcast(digit, self.dtype) for digit in digits]
            if by_logic:
                digits = [jnp.concatenate([*digits, by_logic[i]])]
            operands.append(digits)
        return operands

    def combine(self, digits: list) -> Array:
        """The digits put together, or what products with them have become."""
        total, *rest = digits
        for digit in rest:
            total = (total * self.base if self.base > 1 else total) + digit
        return total


_base = 256


@ft.cache
def _int8_digits(
    levels: tuple[float, ...], digits: int
) -> tuple[list[np.ndarray], float]:
    """The codebook in int8, what that leaves in 256ths, and what one has become."""
    table = _normalized(levels)
    if digits == 1:
        # The largest level need not be 127: other scales round the levels better.
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
    """The codebook in floats of 8 bits, and what these leave; as bytes."""
    table = _normalized(levels)

    def rounded(scale) -> list[np.ndarray]:
        left, out = table * scale, []
        for _ in range(digits):
            out.append(left.astype(dtype))
            left = left - out[-1].astype(np.float64)
        return out

    def error(scale) -> float:
        total = sum(digit.astype(np.float64) for digit in rounded(scale))
        return float(np.sum((total / scale - table) ** 2))

    # An octave of scales, as large as the larger floats that there are.
    scale = min(np.linspace(8, 16, 2001), key=error)
    return [digit.view(np.int8) for digit in rounded(scale)], float(scale)


def _make_table(entries: np.ndarray, chip: Chip) -> Array:
    """In a kernel: one entry to a row or to a lane, whichever the hardware looks up."""
    index = lax.broadcasted_iota(jnp.int32, (32, lanes), chip.gather_axis)
    table = jnp.zeros((32, lanes), jnp.int32)
    for i, entry in enumerate(entries):
        table = jnp.where(index == i, jnp.int32(entry), table)
    return table.astype(jnp.int8)
