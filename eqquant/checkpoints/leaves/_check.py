"""Check that the parts of an array fit together.

Parts from a file may be arbitrary. A product of parts that do not fit would read out of
bounds.
"""

import math
from collections.abc import Callable, Iterator, Sequence
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
    planes_of,
    PowerOfTwoScales,
    problems_of,
    problems_of_scales,
    QuantizedOffsets,
    QuantizedScales,
    unpack,
)
from ._processes import local_parts


_chunk = 2**20  # Bytes of codes that are checked at once.
Problems = Iterator[str | Exception]


def check_fit(array: Any) -> None:
    """Raise a `ValueError` if shapes and dtypes of the parts do not fit. The parts may
    be abstract."""
    # The first problem raises. So each check may rely on the checks before it.
    for problem in _checks[type(array)](array):
        raise ValueError(str(problem))


def check_codes(array: Any) -> None:
    """Raise a `ValueError` if codes are not valid in their format. Scales may have any
    value, including NaN."""
    is_quantized = lambda x: isinstance(x, QuantizedArray)
    for q in jax.tree.leaves(array, is_leaf=is_quantized):
        if is_quantized(q) and q.format.unused_codes:
            for codes in local_parts(q.codes):
                _check_codes(codes, q.format)


def _check_codes(codes: np.ndarray, format: Format) -> None:
    bits, mask = format.bits, 2**format.bits - 1
    unused = {code & mask for code in format.unused_codes}
    flat = codes.reshape(-1).view(np.uint8)
    step = _chunk
    if bits == 3:  # Each code spans two bytes.
        group = num_bytes(format.group, 3)
        step = max(step // group, 1) * group
        table = np.array([code in unused for code in range(8)])
        read = lambda part: np.asarray(unpack(jnp.asarray(part), 3, format.group))
    else:  # The table covers all bytes that contain an unused code.
        shifts = range(0, planes_of(bits) * bits, bits)
        is_invalid = lambda byte: any(byte >> s & mask in unused for s in shifts)
        table = np.array([is_invalid(byte) for byte in range(256)])
        read = lambda part: part
    for start in range(0, flat.size, step):
        if table[read(flat[start : start + step])].any():
            raise ValueError(
                f"codes must not be {sorted(format.unused_codes)} in {format!r}."
            )


def _quantized(q: QuantizedArray) -> Problems:
    if q.codes is None or q.scales is None:
        yield "codes and scales must both be present."
    if not jnp.issubdtype(q.dtype, jnp.floating):
        yield f"dtype must be floating point, got {q.dtype}."
    if not q.codes.ndim:
        yield "codes must have at least one axis."
    if not q.axes:
        yield "axes must name at least one blocked axis."
    yield from _axes(q.axes, q.codes.ndim - 1 + len(q.axes))
    if len(q.inner) != len(q.axes) - 1 or not all(
        type(n) is int and n >= 0 for n in q.inner
    ):
        yield f"inner must have {len(q.axes) - 1} sizes for {q.axes}, got {q.inner}."
    stored = num_codes(q.codes.shape[-1], q.format.bits)
    if type(q.padding) is not int or not 0 <= q.padding <= stored:
        yield f"padding must be from 0 to {stored}, got {q.padding}."
    size, inner = stored - q.padding, math.prod(q.inner)
    if size % inner if inner else size:
        yield f"inner must divide the {size} values of a row, got {q.inner}."
    yield from problems_of(
        q.format, q.codes, q.scales, q.offsets, size=size, exact=False
    )


def _axes(axes: Sequence[int], ndim: int) -> Problems:
    is_valid = all(type(a) is int and -ndim <= a < 0 for a in axes)
    if not is_valid or len(set(axes)) != len(axes):
        yield f"axes must be different, and from {-ndim} to -1; got {tuple(axes)}."


def _lora(w: LoraArray) -> Problems:
    yield from _whole(w)
    yield from _axes((*w.in_axes, *w.out_axes), w.ndim)
    for axes in (w.in_axes, w.out_axes):
        if not axes or axes != tuple(sorted(axes)):
            yield f"axes must be in ascending order, got {axes}."
    if not w.b.ndim:
        yield "b must have at least one axis."
    for name, axes in w.factors.items():
        part = getattr(w, name)
        expected = tuple(w.rank if i is None else w.shape[i] for i in axes)
        if part.shape != expected:
            yield f"{name} must have the shape {expected}, got {part.shape}."
        kind = jax.dtypes.prng_key if name == "key" else jnp.floating
        if not jnp.issubdtype(part.dtype, kind):
            yield f"{name} must be {kind.__name__}, got {part.dtype}."
    if not jnp.issubdtype(w.dtype, jnp.floating):
        yield f"base must be floating point, got {w.dtype}."
    if not math.isfinite(w.scale):
        yield f"scale must be finite, got {w.scale}."
    if not 0 <= w.dropout < 1:
        yield f"dropout must be in [0, 1), got {w.dropout}."


def _straight_through(w: StraightThroughArray) -> Problems:
    yield from _whole(w)
    master = w.master
    if master.shape != w.q.shape or not jnp.issubdtype(master.dtype, jnp.floating):
        yield f"master must be floating point of the shape {w.q.shape}, got {master}."


def _rotated(w: RotatedArray) -> Problems:
    yield from _whole(w)
    block, size = w.block, w.shape[w.axis]
    is_power = type(block) is int and block > 0 and block & (block - 1) == 0
    if not is_power or size % block:
        yield f"block must be a power of two that divides {size}, got {block}."


def _whole(w: Any) -> Problems:
    if not w.is_whole:
        yield f"{type(w).__name__} must have all of its parts."


_checks: dict[type, Callable[[Any], Iterator[Any]]] = {
    QuantizedArray: _quantized,
    QuantizedScales: problems_of_scales,
    QuantizedOffsets: problems_of_scales,
    PowerOfTwoScales: problems_of_scales,
    Float8Scales: problems_of_scales,
    LoraArray: _lora,
    RotatedArray: _rotated,
    StraightThroughArray: _straight_through,
}
# Classes that a file may contain, by name.
CLASSES = {cls.__name__: cls for cls in _checks}
# Parts of these classes that may be more than plain arrays.
PARTS: dict[tuple[type, str], tuple[type, ...]] = {
    (QuantizedArray, "scales"): (QuantizedScales, PowerOfTwoScales, Float8Scales),
    (QuantizedArray, "offsets"): (type(None), QuantizedOffsets),
    (LoraArray, "base"): (QuantizedArray, RotatedArray, StraightThroughArray),
    (LoraArray, "key"): (type(None),),
    (RotatedArray, "base"): (QuantizedArray,),
    (StraightThroughArray, "q"): (QuantizedArray,),
}
