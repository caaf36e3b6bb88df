"""Straight-through estimators."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped

from .._jax import typed, wide_dtype
from ..arrays import (
    no_problem,
    quantize,
    QuantizedArray,
)
from ..formats import as_format, Binary, float_scales, Format, Int8, num_codes
from ..kernels import Compute
from ._round_trip import has_round_trip, round_trip
from ._straight_through_array import straight_through_value, StraightThroughArray


@typed
def straight_through(
    array: Shaped[Array, "..."] | Shaped[np.ndarray, "..."],
    format: Format | str = "nf4",
    *,
    axis: int | Sequence[int] = -1,
    scales: Float[Array, "*lead blocks"] | None = None,
    offsets: Float[Array, "*lead blocks"] | None = None,
    clip: bool = False,
    check_finite: bool = True,
) -> Float[Array, "..."]:
    """Quantize an array and dequantize it again, with the gradient of the identity.

    The value equals `eqquant.quantize(array, format, axis=axis).dequantize()`, bit for
    bit. The derivative is the straight-through estimator (Bengio et al., arXiv
    1308.3432). If you pass `scales`, they also receive gradients, like the step sizes
    of LSQ (arXiv 1902.08153).

    !!! Example

        ```python
        import eqquant
        import jax
        import jax.numpy as jnp

        weight = jax.random.normal(jax.random.key(0), (8, 64))


        def loss(weight, x):
            return jnp.sum((eqquant.straight_through(weight, "nf4") @ x) ** 2)


        gradient = jax.jit(jax.grad(loss))(weight, jnp.ones(64))
        assert gradient.shape == weight.shape
        ```

    **Arguments:**

    - `array`, `format`, `axis`, `check_finite`: as in [`eqquant.quantize`][].
    - `scales`: `(*lead, blocks)`, as in [`eqquant.quantize`][]. Start from
        [`eqquant.training.initial_scales`][]. The gradient of the array is then always
        clipped, like in the paper. The gradient of a scale is divided by the square
        root of the largest level times the number of values that share the scale.
    - `offsets`: `(*lead, blocks)`, with `scales`, for an affine format. Start from the
        scales and offsets of [`eqquant.quantize`][]. Their gradient follows LSQ+ (arXiv
        2004.09576), with the same divisor as scales.
    - `clip`: stop the gradient where `abs(array)` exceeds the largest level of its
        block by more than rounding. This is useful for ternary and binary; other
        formats do not clip values.

    **Returns:**

    A floating-point array of the shape and dtype of `array`.

    **Raises:**

    The errors of [`eqquant.quantize`][], and `ValueError` if `scales` are given for a
    format whose levels are not integers.
    """
    array, format = _trainable(array, format)
    plain = scales is None and offsets is None and not clip
    if plain and has_round_trip(array, format, axis):
        value, problems = round_trip(lax.stop_gradient(array), format)
        if check_finite:
            zero = no_problem(jnp.any(problems), array, format)
            value = value if zero is None else value + zero
        return straight_through_value(value, array)
    trainable = make_trainable(
        array,
        format,
        axis=axis,
        scales=scales,
        offsets=offsets,
        clip=clip,
        check_finite=check_finite,
    )
    return trainable.dequantize()


def make_trainable(
    array,
    format: Format | str,
    *,
    axis: int | Sequence[int],
    scales,
    offsets,
    clip: bool,
    check_finite: bool,
    compute: Compute | None = None,
) -> StraightThroughArray:
    """Return the array whose value is [`straight_through`][]."""
    array, format = _trainable(array, format)
    if scales is not None:
        _check_learnable(format, "straight_through")
    # No derivatives here: the master weights receive them later.
    fixed, fixed_scales, fixed_offsets = lax.stop_gradient((array, scales, offsets))
    q = quantize(
        fixed,
        format,
        axis=axis,
        scales=fixed_scales,
        offsets=fixed_offsets,
        check_finite=check_finite,
        compute=compute,
    )
    if scales is not None:
        array = _learning(array, scales, offsets, q)
    elif clip:
        array = _clipped(array, q)
    return StraightThroughArray(array, q)


def _trainable(array, format: Format | str) -> tuple[Array, Format]:
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            "straight_through: array must have a floating-point dtype, got "
            f"{array.dtype}: only the float weights that were quantized can be trained."
        )
    return array, as_format(format, "straight_through")


@typed
def initial_scales(
    array: Float[Array, "..."] | Float[np.ndarray, "..."],
    format: Format | str,
    *,
    axis: int | Sequence[int] = -1,
) -> Float[Array, "*lead blocks"]:
    """Return initial values of learned scales (LSQ, arXiv 1902.08153, section 2.1).

    A scale is twice the mean magnitude of its block, divided by the square root of the
    largest level.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        scales = eqquant.training.initial_scales(weight, "int4")
        assert scales.shape == (64, 256 // 32)
        trained = eqquant.straight_through(weight, "int4", scales=scales)
        ```

    **Arguments:**

    - `array`, `axis`: as in [`eqquant.quantize`][].
    - `format`: a format with integer levels: INT8, INT4, INT3, INT2, ternary or binary.
        For an affine format, start from the `scales` and `offsets` of
        [`eqquant.quantize`][].

    **Returns:**

    `(*lead, blocks)`, of the `scale_dtype` of the format: for `scales` of
    [`eqquant.straight_through`][] and [`eqquant.quantize`][].

    **Raises:**

    `ValueError` for another format.
    """
    format = as_format(format)
    _check_learnable(format, "initial_scales")
    if format.has_offsets:
        raise ValueError(
            f"initial_scales: format must have no offsets, got {format!r}. Start from "
            "the scales and offsets that eqquant.quantize gives."
        )
    # The scale of Binary is the mean magnitude of a block.
    mean = Binary(block_size=format.block_size, scale_dtype=format.scale_dtype)
    scales = _float_parts(quantize(array, mean, axis=axis), axis)[0]
    return _not_zero(scales * (2 / math.sqrt(_highest(format))))


def initial_parts(array, format: Format, axis: int | Sequence[int]) -> tuple[Any, Any]:
    """Return initial scales, and initial offsets or None."""
    if not format.has_offsets:
        return initial_scales(array, format, axis=axis), None
    _check_learnable(format, "initial_scales")
    scales, offsets = _float_parts(quantize(array, format, axis=axis), axis)
    return _not_zero(scales), offsets


def _float_parts(q: QuantizedArray, axis: int | Sequence[int]) -> tuple[Any, Any]:
    """Return scales and offsets in the shape that `quantize` accepts."""
    parts = q.float_parts
    over_all_axes = not isinstance(axis, int) and len(axis) == q.ndim
    if over_all_axes and q.format.block_size is None:
        # A per-tensor scale is stored once per row.
        parts = jax.tree.map(lambda x: x.reshape(-1)[:1], parts)
    return parts


def _not_zero(start: Float[Array, "*lead blocks"]) -> Float[Array, "*lead blocks"]:
    # A block of zeros needs a nonzero initial scale.
    return jnp.where(start != 0, start, jnp.maximum(jnp.mean(jnp.abs(start)), 1e-6))


def _check_learnable(format: Format, caller: str) -> None:
    if not format.integer_levels:
        raise ValueError(
            f"{caller}: scales are learned for formats with integer levels: Int8, "
            f"Int6, Int5, Int4, Int3, Int2, Ternary and Binary; got {format!r}."
        )


@jax.custom_jvp
def _clipped(array, q):
    """Return the array, without a derivative where it exceeds the range of `q`."""
    return array


@_clipped.defjvp
def _(primals, tangents):
    array, q = primals
    tangent, _ = tangents
    each = _spread(q, float_scales(q.scales))
    # The scale is rounded, so the value that determined it is in range.
    rounding = 1 + 4 * float(jnp.finfo(q.format.scale_dtype).eps)
    lowest, highest = q.format.lowest_level, _highest(q.format)
    # Scales can be negative.
    ends = each * (lowest * rounding), each * (highest * rounding)
    if q.offsets is not None:
        middle = _spread(q, float_scales(q.offsets))
        ends = tuple(end + middle for end in ends)
    inside = (array >= jnp.minimum(*ends)) & (array <= jnp.maximum(*ends))
    return _clipped(array, q), jnp.where(inside, tangent, 0)


@jax.custom_jvp
def _learning(array, scales, offsets, q):
    """Return the array, with the derivative of its quantized value by these scales and
    offsets."""
    return array


@_learning.defjvp
def _(primals, tangents):
    # Equations 3 and 5 and the gradient scale of section 2.2 of LSQ; offsets follow
    # section 3.1 of LSQ+.
    array, scales, offsets, q = primals
    array_dot, scales_dot, offsets_dot, _ = tangents
    each = _spread(q, scales)
    lowest, highest = q.format.lowest_level, _highest(q.format)
    ratio = array.astype(each.dtype)
    ratio = (ratio if offsets is None else ratio - _spread(q, offsets)) / each
    inside = (ratio > lowest) & (ratio < highest)
    weight = 1 / math.sqrt(array.size / scales.size * highest)
    by_scale = (_levels(q) - jnp.where(inside, ratio, 0)) * weight
    tangent = by_scale * _spread(q, scales_dot) + jnp.where(inside, array_dot, 0)
    if offsets is not None:
        tangent += jnp.where(inside, 0, weight) * _spread(q, offsets_dot)
    return _learning(array, scales, offsets, q), tangent.astype(array.dtype)


def _highest(format: Format) -> int | float:
    """The largest positive level."""
    return format.highest_level or format.largest_level


def _levels(q: QuantizedArray) -> Float[Array, "..."]:
    """Return each value of `q` in units of its scale."""
    return q.replace(
        scales=jnp.ones_like(q.scales), offsets=None, dtype=wide_dtype(q.dtype)
    ).dequantize()


def _spread(
    q: QuantizedArray, scales: Float[Array, "*lead blocks"]
) -> Float[Array, "..."]:
    """Return the scale of each value of `q`."""
    format = Int8(block_size=q.format.block_size, scale_dtype=q.format.scale_dtype)
    padded = num_codes(q.codes.shape[-1], q.format.bits)
    size = padded - q.padding
    ones = jnp.ones((*q.codes.shape[:-1], format.padded(size)), format.code_dtype)
    return q.replace(
        codes=ones,
        scales=jnp.broadcast_to(
            scales.astype(wide_dtype(scales.dtype)), q.scales.shape
        ),
        offsets=None,
        format=format,
        dtype=wide_dtype(q.dtype),
        padding=format.padded(size) - size,
    ).dequantize()
