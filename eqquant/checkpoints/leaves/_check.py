"""Whether the parts of an array fit together. What comes out of a file may be anything,
and a product of parts that do not fit would read past their end."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...arrays import LoraArray, QuantizedArray, RotatedArray, StraightThroughArray
from ...formats import (
    Float8Scales,
    Format,
    num_bytes,
    num_codes,
    num_groups,
    planes_of,
    PowerOfTwoScales,
    QuantizedOffsets,
    QuantizedScales,
    scales_and_offsets,
    ShortScales,
    unpack,
)
from ._processes import local_parts


_scale_dtypes = ("bfloat16", "float32", "float64")
_bytes_at_once = 2**20


def check_fit(array: Any) -> None:
    """A `ValueError` if shapes and dtypes of the parts, which may be described rather
    than there, do not fit."""
    _checks[type(array)](array)


def check_codes(array: Any) -> None:
    """A `ValueError` if there are codes that stand for nothing. Scales may be anything,
    NaN included."""
    is_quantized = lambda x: isinstance(x, QuantizedArray)
    for q in jax.tree.leaves(array, is_leaf=is_quantized):
        if is_quantized(q) and q.format.unused_codes:
            for codes in local_parts(q.codes):
                _check_codes(codes, q.format)


def _check_codes(codes: np.ndarray, format: Format) -> None:
    bits, mask = format.bits, 2**format.bits - 1
    unused = {code & mask for code in format.unused_codes}
    flat = codes.reshape(-1).view(np.uint8)
    step = _bytes_at_once
    if bits == 3:  # A code is in two bytes.
        group = num_bytes(format.group, 3)
        step = max(step // group, 1) * group
        table = np.array([code in unused for code in range(8)])
        read = lambda part: np.asarray(unpack(jnp.asarray(part), 3, format.group))
    else:  # Bytes that hold such a code, whichever of theirs it is.
        shifts = range(0, planes_of(bits) * bits, bits)
        has = lambda byte: any(byte >> s & mask in unused for s in shifts)
        table = np.array([has(byte) for byte in range(256)])
        read = lambda part: part
    for start in range(0, flat.size, step):
        if table[read(flat[start : start + step])].any():
            raise ValueError(f"there are codes that {format!r} does not have.")


def _require(ok: Any, what: str) -> None:
    if not ok:
        raise ValueError(what)


def _check_axes(axes: Sequence[int], ndim: int) -> None:
    _require(
        all(type(a) is int and -ndim <= a < 0 for a in axes)
        and len(set(axes)) == len(axes),
        f"axes must be different, and from {-ndim} to -1; got {tuple(axes)}.",
    )


def _check_quantized(q: QuantizedArray) -> None:
    codes, scales, format = q.codes, q.scales, q.format
    _require(codes is not None and scales is not None, "codes or scales are missing.")
    _require(
        jnp.issubdtype(q.dtype, jnp.floating),
        f"dtype must be floating point, got {q.dtype}.",
    )
    expected = jnp.dtype(format.code_dtype)
    _require(
        codes.dtype == expected,
        f"codes of {format!r} must be {expected}, not {codes.dtype}.",
    )
    _require(
        scales.dtype.name in _scale_dtypes,
        f"scales must be one of {_scale_dtypes}, not {scales.dtype}.",
    )
    _require(codes.ndim >= 1 and scales.ndim >= 1, "codes or scales have no axes.")
    _require(
        codes.shape[:-1] == scales.shape[:-1],
        f"codes of the shape {codes.shape} do not fit scales of {scales.shape}.",
    )
    offsets = q.offsets
    fits = offsets is None or (
        offsets.shape == scales.shape and offsets.dtype.name in _scale_dtypes
    )
    _require(
        fits and format.has_offsets == (offsets is not None),
        f"offsets do not fit scales of {scales.shape} in {format!r}.",
    )
    kinds = scales_and_offsets(format.no_scales((), 1), format)
    for part, kind in zip((scales, offsets), map(type, kinds), strict=True):
        if isinstance(part, ShortScales):  # After scaling they are plain ones.
            _require(
                type(part) is kind,
                f"scales of {format!r} must be {kind.__name__}, not "
                f"{type(part).__name__}.",
            )
    _require(q.axes, "no axis is blocked.")
    _check_axes(q.axes, codes.ndim - 1 + len(q.axes))
    _require(
        len(q.inner) == len(q.axes) - 1
        and all(type(n) is int and n >= 0 for n in q.inner),
        f"the sizes {q.inner} do not fit the axes {q.axes}.",
    )
    held = num_codes(codes.shape[-1], format.bits)
    _require(
        type(q.padding) is int and 0 <= q.padding <= held,
        f"padding must be from 0 to {held}, got {q.padding}.",
    )
    size, inner = held - q.padding, math.prod(q.inner)
    _require(
        size % inner == 0 if inner else size == 0,
        f"{size} codes do not fill axes of {q.inner}.",
    )
    _require(
        format.padded(size) == held,
        f"{format!r} stores {format.padded(size)} codes for {size}, not {held}.",
    )
    _require(
        format.num_blocks(size) == scales.shape[-1],
        f"{format!r} has {format.num_blocks(size)} scales for {size} codes, not "
        f"{scales.shape[-1]}.",
    )


def _check_scales(scales: QuantizedScales) -> None:
    codes, exponents = scales.codes, scales.exponents
    _require(codes is not None and exponents is not None, "a part is missing.")
    dtype = np.int8 if isinstance(scales, QuantizedOffsets) else np.uint8
    fits = (
        (codes.dtype, exponents.dtype) == (dtype, np.uint8)
        and codes.ndim >= 1
        and exponents.shape == (*codes.shape[:-1], num_groups(codes.shape[-1]))
    )
    _require(
        fits,
        f"codes {codes.dtype}{codes.shape} do not fit exponents "
        f"{exponents.dtype}{exponents.shape}.",
    )


def _check_lora(w: LoraArray) -> None:
    _require(w.is_whole, "a part is missing.")
    _check_axes((*w.in_axes, *w.out_axes), w.ndim)
    for axes in (w.in_axes, w.out_axes):
        _require(axes and axes == tuple(sorted(axes)), f"{axes} are not in order.")
    _require(w.b.ndim, "b has no axes.")
    for name, axes in w.axes_of_parts.items():
        part = getattr(w, name)
        expected = tuple(w.rank if i is None else w.shape[i] for i in axes)
        _require(
            part.shape == expected,
            f"{name} must have the shape {expected}, not {part.shape}.",
        )
        kind = jax.dtypes.prng_key if name == "key" else jnp.floating
        _require(jnp.issubdtype(part.dtype, kind), f"{name} cannot be {part.dtype}.")
    _require(
        jnp.issubdtype(w.dtype, jnp.floating),
        f"the base must be floating point, got {w.dtype}.",
    )
    _require(math.isfinite(w.scale), f"scale must be finite, got {w.scale}.")
    _require(0 <= w.dropout < 1, f"dropout must be in [0, 1), got {w.dropout}.")


def _check_straight_through(w: StraightThroughArray) -> None:
    _require(w.is_whole, "a part is missing.")
    _require(
        w.master.shape == w.q.shape and jnp.issubdtype(w.master.dtype, jnp.floating),
        f"weights {w.master.dtype}{w.master.shape} do not fit {w.q.shape}.",
    )


def _check_rotated(w: RotatedArray) -> None:
    _require(w.is_whole, "a part is missing.")
    block = w.block
    _require(
        type(block) is int
        and block > 0
        and block & (block - 1) == 0
        and w.shape[w.axis] % block == 0,
        f"an axis of {w.shape[w.axis]} cannot be rotated in blocks of {block}.",
    )


def _check_powers(scales: PowerOfTwoScales) -> None:
    exponents = scales.exponents
    fits = exponents is not None and exponents.dtype == np.uint8 and exponents.ndim >= 1
    _require(fits, f"exponents must be uint8 with one axis or more, got {exponents!r}.")


def _check_float8(scales: Float8Scales) -> None:
    codes, units = scales.codes, scales.units
    _require(codes is not None and units is not None, "a part is missing.")
    fits = codes.dtype == np.uint8 and units.dtype == np.float32 and codes.ndim >= 1
    _require(
        fits and units.shape == (*codes.shape[:-1], 1),
        f"codes {codes.dtype}{codes.shape} do not fit units "
        f"{units.dtype}{units.shape}.",
    )


_checks: dict[type, Callable[[Any], None]] = {
    QuantizedArray: _check_quantized,
    QuantizedScales: _check_scales,
    QuantizedOffsets: _check_scales,
    PowerOfTwoScales: _check_powers,
    Float8Scales: _check_float8,
    LoraArray: _check_lora,
    RotatedArray: _check_rotated,
    StraightThroughArray: _check_straight_through,
}
# What a file may hold beside plain arrays, by name; and which of their parts may be
# more than that.
CLASSES = {cls.__name__: cls for cls in _checks}
PARTS: dict[tuple[type, str], tuple[type, ...]] = {
    (QuantizedArray, "scales"): (QuantizedScales, PowerOfTwoScales, Float8Scales),
    (QuantizedArray, "offsets"): (type(None), QuantizedOffsets),
    (LoraArray, "base"): (QuantizedArray, RotatedArray, StraightThroughArray),
    (LoraArray, "key"): (type(None),),
    (RotatedArray, "base"): (QuantizedArray,),
    (StraightThroughArray, "q"): (QuantizedArray,),
}
