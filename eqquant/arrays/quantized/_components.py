"""Quantized arrays from their components."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, UInt8

from ..._jax import typed
from ...formats import (
    as_format,
    Format,
    num_codes,
    QuantizedOffsets,
    scales_and_offsets,
    ShortScales,
)
from ._array import QuantizedArray
from ._axes import canonical_axes


@typed
def from_components(
    codes: UInt8[Array, "*lead packed"] | Int8[Array, "*lead packed"],
    scales: Float[Array, "*lead blocks"] | ShortScales,
    format: Format | str,
    *,
    dtype: Any = "float32",
    axis: int | Sequence[int] = -1,
    size: int | Sequence[int] | None = None,
    offsets: Float[Array, "*lead blocks"] | QuantizedOffsets | None = None,
) -> QuantizedArray:
    """Make a quantized array from its parts, for example those of a checkpoint.

    **Arguments:**

    - `codes`: `(*lead, packed)`, packed as `format` packs them.
    - `scales`: `(*lead, blocks)`, of the `scale_dtype` of the format; or an
        [`eqquant.formats.QuantizedScales`][] with double quantization, and what MXFP4
        and NVFP4 have in its place.
    - `format`: a format, or the name of one.
    - `dtype`: the dtype of the array that they stand for.
    - `axis`: the blocked axis (or axes) of that array.
    - `size`: the length of the blocked axis, or a tuple of lengths. The default, for
        one axis, is all that `codes` holds.
    - `offsets`: as `scales`, for an affine format; an
    [`eqquant.formats.QuantizedOffsets`][]
        with double quantization.

    **Returns:**

    A [`eqquant.QuantizedArray`][].

    **Raises:**

    `TypeError` or `ValueError` if the parts do not fit together.
    """
    format = as_format(format)
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"from_components: dtype must be floating point, got {dtype}.")
    if codes.dtype != format.code_dtype:
        raise TypeError(
            f"from_components: codes of {format!r} must be "
            f"{jnp.dtype(format.code_dtype)}, got {codes.dtype}."
        )
    if scales.dtype != format.scale_dtype:
        raise TypeError(
            f"from_components: scales must be {format.scale_dtype} as {format!r} has "
            f"it, got {scales.dtype}."
        )
    kinds = scales_and_offsets(format.no_scales((), 1), format)
    given = {"scales": scales, "offsets": offsets}
    for (name, part), known in zip(given.items(), kinds, strict=True):
        if part is not None and known is not None and _kind(part) != _kind(known):
            raise TypeError(
                f"from_components: {name} of {format!r} must be {_kind(known)}."
            )
    if scales.shape[:-1] != codes.shape[:-1]:
        raise ValueError(
            f"from_components: scales must have the leading axes {codes.shape[:-1]} of "
            f"codes, got {scales.shape[:-1]}."
        )
    count = 1 if isinstance(axis, int) else len(axis)
    axes = canonical_axes(axis, codes.ndim - 1 + count)
    held = num_codes(codes.shape[-1], format.bits)
    if size is None:
        if count > 1:
            raise ValueError("from_components: several axes need their sizes in size.")
        size = held
    sizes = (size,) if isinstance(size, int) else tuple(size)
    if len(sizes) != count:
        raise ValueError(
            f"from_components: size must give {count} sizes, one for each of axis, got "
            f"{size}."
        )
    total = math.prod(sizes)
    if held != format.padded(total):
        raise ValueError(
            f"from_components: codes hold {held} values along the blocked axis, but "
            f"{format!r} stores {format.padded(total)} for a size of {size}."
        )
    blocks = format.num_blocks(total)
    if scales.shape[-1] != blocks:
        raise ValueError(
            f"from_components: scales must have {blocks} blocks for a size of {size}, "
            f"got {scales.shape[-1]}."
        )
    if format.has_offsets != (offsets is not None):
        needs = "needs" if format.has_offsets else "has no"
        raise ValueError(f"from_components: {format!r} {needs} offsets.")
    if offsets is not None and (offsets.shape, offsets.dtype) != (
        scales.shape,
        format.scale_dtype,
    ):
        raise ValueError(
            f"from_components: offsets must be {format.scale_dtype}{scales.shape}, as "
            f"scales are, got {offsets.dtype}{offsets.shape}."
        )
    fields = format, dtype, axes, sizes[1:], held - total
    return QuantizedArray(codes, scales, *fields, offsets=offsets)


def _kind(scales) -> str:
    short = isinstance(scales, ShortScales)
    return f"eqquant.formats.{type(scales).__name__}" if short else "an array"
