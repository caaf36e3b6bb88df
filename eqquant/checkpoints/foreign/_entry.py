"""A tensor in a file of another library, and the functions that read it."""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._jax import config
from ...arrays import from_components, QuantizedArray
from ...formats import (
    abstract_scales,
    Codebook,
    DenseTernary,
    FittedFormat,
    Format,
    FourBitScales,
    FP8,
    Int8,
    MXFP4,
    NF4,
    pack,
    ShortScales,
    Ternary,
)
from ..files import fill, Part, to_jax


class NotExact(ValueError):
    """No format stores the tensor exactly. The message gives the reason."""


@dataclasses.dataclass(frozen=True)
class ByRows:
    """A quantized tensor whose rows, along the first axis, can be read separately.

    **Fields:**

    - `read`: reads some rows as codes, scales and offsets, in NumPy, or raises
        [`NotExact`][]. It may write them into its second argument: see [`Part`][].
    - `build`: makes an array of the parts of all rows, which may be stacked.
    - `places`: slices of rows. The parts of a slice stay in the cache of a core.
    """

    read: Callable[[slice, Any], Any]
    build: Callable[[Any], QuantizedArray]
    places: Sequence[slice]

    def read_all(self) -> QuantizedArray:
        parts = [Part("", (rows,), ft.partial(self.read, rows)) for rows in self.places]
        return self.build(fill((self.places[-1].stop,), parts))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor in a file of another library.

    **Fields:**

    - `where`: the file and the name, for errors.
    - `shape`, `dtype`: of the decoded array.
    - `decode`: reads and decodes the array. It may use the memory of the file.
    - `quantized`: reads codes and scales unchanged, or raises [`NotExact`][]. `None`
        for an array that is not quantized.
    - `by_rows`: reads some rows of codes and scales, if that is possible.
    - `abstract`: returns the result of `quantized` with `jax.ShapeDtypeStruct`s, if the
        header determines it.
    """

    where: str
    shape: tuple[int, ...]
    dtype: np.dtype
    decode: Callable[[], np.ndarray]
    quantized: Callable[[], QuantizedArray] | None = None
    kind: tuple[str, bool] = ("", False)
    parts: tuple[str, ...] = ()
    by_rows: ByRows | None = None
    abstract: Callable[[], QuantizedArray] | None = None

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=object))

    def read(self, decode: bool) -> Array | QuantizedArray:
        """Read the tensor without rounding. With `decode`, decode it to floats if no
        format stores it exactly."""
        if self.quantized is not None:
            try:
                return self.quantized()
            except NotExact as error:
                if not decode:
                    raise self.not_exact(error, "decode=True") from None
        return _as_jax(self.decode(), decode, self.where)

    def not_exact(self, error: NotExact, way_out: str) -> NotExact:
        return NotExact(
            f"{self.where}: {error} Pass {way_out} to decode it to floating point."
        )


def _as_jax(array: np.ndarray, decode: bool, where: str) -> Array:
    """Convert to a JAX array, which has no 64-bit dtypes without x64."""
    if array.dtype.itemsize < 8 or config("jax_enable_x64"):
        return to_jax(array)
    narrow = array.astype(_narrower.get(array.dtype.name, array.dtype))
    is_equal = narrow.astype(array.dtype) == array
    if np.all(is_equal | (array != array)) or (decode and narrow.dtype.kind == "f"):
        return to_jax(narrow)
    raise NotExact(
        f"{where}: has {array.dtype.name} values that {narrow.dtype.name} cannot "
        "represent. Turn on jax_enable_x64."
    )


_narrower = {
    "int64": "int32",
    "uint64": "uint32",
    "float64": "float32",
    "complex128": "complex64",
}


# The results of `codes_of_levels`. In other formats, a code is a level minus the lowest
# level.
_levels: dict[type[Format], tuple[Callable, int, int]] = {
    Ternary: (lambda levels: (levels & 3).astype(np.uint8), -1, 1),
    DenseTernary: (lambda levels: (levels + 1).astype(np.uint8), -1, 1),
    **dict.fromkeys(
        (NF4, MXFP4, Codebook), (lambda codes: codes.astype(np.uint8), 0, 15)
    ),
    FP8: (lambda codes: codes, 0, 255),
}
# Low float32 mantissa bits that are zero in 16-bit scales. Zeros there make products
# with levels exact.
_low_bits = np.uint32(0xFF)


def codes_of_levels(format: Format) -> tuple[Callable, int, int]:
    """Return a function from levels to codes, the lowest and the highest level."""
    lowest = int(format.lowest_level)
    if isinstance(format, Int8):
        code = lambda level: (level + format.padding_code).astype(np.int8)
        return code, lowest, format.highest_level
    shift = lambda levels: (levels - lowest).astype(np.uint8)
    return _levels.get(type(format), (shift, lowest, lowest + 2**format.code_bits - 1))


def from_levels(
    levels: np.ndarray,
    scales: np.ndarray | ShortScales,
    format: Format,
    dtype: Any = "float32",
    offsets: np.ndarray | ShortScales | None = None,
) -> QuantizedArray:
    """Build a quantized array from integer levels `(*lead, size)` and scales `(*lead,
    blocks)`, exactly, or raise [`NotExact`][]. For formats with a table of levels,
    `levels` are codes. Affine formats have offsets of the same shape as scales."""
    codes = packed_levels(levels, format)
    parts = codes, *stored_scales(scales, offsets, format)
    return from_parts(parts, format, dtype, levels.shape[-1])


def from_parts(
    parts: Any, format: Format, dtype: Any = "float32", size: int | None = None
) -> QuantizedArray:
    """Build a quantized array from packed codes, scales and offsets."""
    codes, scales, offsets = jax.tree.map(to_jax, parts)
    return from_components(
        codes, scales, format, dtype=dtype, size=size, offsets=offsets
    )


def packed_levels(levels: np.ndarray, format: Format) -> np.ndarray:
    """Return the codes of integer levels, or raise [`NotExact`][]."""
    check_levels(levels, format)
    to_codes, *_ = codes_of_levels(format)
    return packed_codes(to_codes(levels), format)


def check_levels(levels: np.ndarray, format: Format) -> None:
    """Raise [`NotExact`][] unless the format has all integer levels."""
    _, lowest, highest = codes_of_levels(format)
    if levels.size:
        low, high = int(levels.min()), int(levels.max())
        if low < lowest or high > highest:
            raise NotExact(
                f"has integers from {low} to {high}; {format!r} stores {lowest} to "
                f"{highest}."
            )


def packed_codes(codes: np.ndarray, format: Format) -> np.ndarray:
    """Pad the last axis of codes, and pack them."""
    size = codes.shape[-1]
    if padding := format.padded(size) - size:
        widths = [(0, 0)] * (codes.ndim - 1) + [(0, padding)]
        codes = np.pad(codes, widths, constant_values=format.padding_code)
    if format.group == 1:
        return codes
    groups = codes.reshape(*codes.shape[:-1], -1, format.group)
    return pack(groups, format.bits).reshape(*codes.shape[:-1], -1)


def from_codes(
    codes: np.ndarray,
    scales: np.ndarray,
    offsets: np.ndarray,
    format: Format,
    dtype: Any = "float32",
) -> QuantizedArray:
    """Build a quantized array of `code * scale + offset`, like [`from_levels`][]. Codes
    start at 0, and the levels of the format at its lowest level."""
    lowest = format.lowest_level
    # The sum of 16-bit values is exact in float64.
    shifted = offsets.astype(np.float64) - lowest * scales.astype(np.float64)
    return from_levels(
        codes.astype(np.int8) + np.int8(lowest), scales, format, dtype, shifted
    )


def _float32(scales: np.ndarray, smallest: float = 1.0) -> np.ndarray:
    """Convert to float32, or raise [`NotExact`][] if products with the smallest level
    are subnormal."""
    scales = np.ascontiguousarray(scales, np.float32)
    tiny = np.finfo(np.float32).tiny / smallest
    if np.any((np.abs(scales) < tiny) & (scales != 0)):
        raise NotExact(
            "has values that are subnormal in float32, which XLA flushes to 0."
        )
    return scales


def integers_times(
    units: np.ndarray, integers: np.ndarray, format: Format
) -> ShortScales:
    """Return scales or offsets of a K-quant, in NumPy, in which `units` multiply
    `integers`."""
    kind = _abstract_scales(format)
    if isinstance(kind, FourBitScales):
        integers = integers[..., ::2] | integers[..., 1::2] << np.uint8(4)
    return jax.tree.unflatten(jax.tree.structure(kind), [integers, units])


@ft.cache
def _abstract_scales(format: Format) -> Any:
    return abstract_scales(format)[0]


def stored_scales(scales: Any, offsets: Any, format: Format) -> tuple[Any, Any]:
    """Return scales and offsets as the format stores them, or raise [`NotExact`][]."""
    if isinstance(scales, ShortScales):
        return scales, offsets
    parts = [part for part in (scales, offsets) if part is not None]
    is_half = all(part.dtype == format.scale_dtype == np.float16 for part in parts)
    if is_half and not format.quantized_scales:
        return scales, offsets  # All values of float16 pass the checks below.
    table = [abs(level) for level in format.codebook or () if level]
    scales = _float32(scales, min([1.0, *table]))
    if offsets is None:
        return _stored_scales(scales, format), None
    with np.errstate(over="ignore"):
        shifts = _float32(offsets).astype(format.scale_dtype)
    # The offset of unsigned levels is a bias in the file. Libraries also add it to
    # rounded products. Other offsets are zero points times scales.
    is_unsigned = isinstance(format, FittedFormat) and format.unsigned
    is_exact = is_unsigned or have_exact_products(scales)
    if not is_exact or np.any(shifts != offsets):
        raise NotExact("has scales and offsets whose float32 sums would be rounded.")
    return _stored_scales(scales, format), shifts


def have_exact_products(scales: np.ndarray) -> bool:
    """Return whether float32 scales have no more digits than 16-bit scales. Then
    products with codes are exact in float32."""
    return not np.any(scales.view(np.uint32) & _low_bits)


def _stored_scales(scales: np.ndarray, format: Format) -> Any:
    kind = _abstract_scales(format)
    if isinstance(kind, ShortScales):
        stored = kind.nearest(jnp.asarray(scales))
    else:
        # In NumPy, because XLA would compile the conversion for each shape.
        with np.errstate(over="ignore"):
            stored = scales.astype(format.scale_dtype)
    if not np.array_equal(np.asarray(stored.astype("float32")), scales, equal_nan=True):
        raise NotExact(f"has scales that {format!r} cannot represent.")
    return stored
