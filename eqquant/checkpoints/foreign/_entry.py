"""A tensor in a file of another library: what it is, and how it is read."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._jax import config
from ...arrays import from_components, QuantizedArray
from ...formats import Format, FP8, Int2, Int3, Int4, Int8, NF4, pack, Ternary


class NotHeld(ValueError):
    """No format holds what the file has, bit for bit; the message says what is lost."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """**Fields:**

    - `where`: the file and the name, for errors.
    - `shape`, `dtype`: of the array that it stands for.
    - `decode`: reads it as that array, in memory of its own.
    - `quantized`: reads codes and scales as they are, or raises [`NotHeld`][]; None for
        an array that is not quantized.
    - `kind`: how it is quantized, and whether a format holds that, as far as is known
        without reading it.
    - `parts`: the names of the tensors that it is made of.
    """

    where: str
    shape: tuple[int, ...]
    dtype: np.dtype
    decode: Callable[[], np.ndarray]
    quantized: Callable[[], QuantizedArray] | None = None
    kind: tuple[str, bool] = ("", False)
    parts: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=object))

    def read(self, decode: bool) -> Array | QuantizedArray:
        """Without rounding anything; with `decode` what no format holds is decoded."""
        if self.quantized is not None:
            try:
                return self.quantized()
            except NotHeld as error:
                if not decode:
                    raise NotHeld(
                        f"{self.where}: {error} Pass decode=True to have it decoded to "
                        "floating point."
                    ) from None
        return _as_jax(self.decode(), decode, self.where)


def _as_jax(array: np.ndarray, decode: bool, where: str) -> Array:
    """As JAX holds it, which without x64 has no numbers of 64 bits."""
    if array.dtype.itemsize < 8 or config("jax_enable_x64"):
        return jnp.asarray(array)
    narrow = array.astype(_narrower.get(array.dtype.name, array.dtype))
    same = narrow.astype(array.dtype) == array
    if np.all(same | (array != array)) or (decode and narrow.dtype.kind == "f"):
        return jnp.asarray(narrow)
    raise NotHeld(
        f"{where}: has values in {array.dtype.name} that {narrow.dtype.name} does not "
        "hold, and JAX has no more unless jax_enable_x64 is on."
    )


_narrower = {
    "int64": "int32",
    "uint64": "uint32",
    "float64": "float32",
    "complex128": "complex64",
}


# How levels become codes, and the levels that there are.
_levels: dict[type[Format], tuple[Callable, int, int]] = {
    Int8: (lambda levels: levels.astype(np.int8), -127, 127),
    Ternary: (lambda levels: (levels & 3).astype(np.uint8), -1, 1),
    NF4: (lambda codes: codes.astype(np.uint8), 0, 15),
    FP8: (lambda codes: codes, 0, 255),
    **{
        format: (
            lambda levels, half=half: (levels + half).astype(np.uint8),
            -half,
            half - 1,
        )
        for format, half in ((Int4, 8), (Int3, 4), (Int2, 2))
    },
}
# Bits of float32 that scales of 16 bits leave empty: so products with levels are exact.
_empty = np.uint32(0xFF)


def from_levels(
    levels: np.ndarray,
    scales: np.ndarray,
    format: Format,
    dtype: Any = "float32",
    offsets: np.ndarray | None = None,
) -> QuantizedArray:
    """A quantized array of integers `(*lead, size)` (for NF4 and FP8: codes) and scales
    `(*lead, blocks)`, exactly; or [`NotHeld`][]. An affine format has offsets, like
    scales."""
    to_codes, lowest, highest = _levels[type(format)]
    if levels.size:
        low, high = int(levels.min()), int(levels.max())
        if low < lowest or high > highest:
            raise NotHeld(
                f"has integers from {low} to {high}; {format!r} holds {lowest} to "
                f"{highest}."
            )
    scales, shifts = _float32(scales), None
    if offsets is not None:
        shifts = _float32(offsets)
        if np.any(scales.view(np.uint32) & _empty) or np.any(shifts != offsets):
            raise NotHeld(
                "has scales and offsets that do not add up without rounding in float32."
            )
    codes, size = to_codes(levels), levels.shape[-1]
    if filled := format.padded(size) - size:
        widths = [(0, 0)] * (codes.ndim - 1) + [(0, filled)]
        codes = np.pad(codes, widths, constant_values=format.padding_code)
    if format.group > 1:
        groups = codes.reshape(*codes.shape[:-1], -1, format.group)
        codes = pack(groups, format.bits).reshape(*codes.shape[:-1], -1)
    return from_components(
        jnp.asarray(codes),
        jnp.asarray(scales),
        format,
        dtype=dtype,
        size=size,
        offsets=None if shifts is None else jnp.asarray(shifts),
    )


def from_codes(
    codes: np.ndarray,
    scales: np.ndarray,
    offsets: np.ndarray,
    format: Format,
    dtype: Any = "float32",
) -> QuantizedArray:
    """As [`from_levels`][], of `code * scale + offset` where codes start from zero and
    the levels of the format are around it."""
    half = format.largest_level
    # In float64, which holds this sum of what was in 16 bits.
    moved = offsets.astype(np.float64) + half * scales.astype(np.float64)
    return from_levels(
        codes.astype(np.int8) - np.int8(half), scales, format, dtype, moved
    )


def _float32(scales: np.ndarray) -> np.ndarray:
    scales = np.ascontiguousarray(scales, np.float32)
    if np.any((np.abs(scales) < np.finfo(np.float32).tiny) & (scales != 0)):
        raise NotHeld(
            "has scales that are subnormal in float32, which XLA takes for 0."
        )
    return scales
