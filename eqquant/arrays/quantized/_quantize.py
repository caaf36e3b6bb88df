"""Quantization of one array."""

import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Num, Shaped

from ..._jax import config, is_traced, typed
from ...formats import as_format, Format, scales_and_offsets
from ...kernels import as_compute, Compute
from .._matrices import canonical_axes, other_axes
from ._array import QuantizedArray
from ._encode import (
    elements_at_once,
    encode_rows,
    encode_rowwise,
    has_encoder,
    is_a_scale,
    per_tensor,
)


@typed
def quantize(
    array: Shaped[Array, "..."] | Shaped[np.ndarray, "..."],
    format: Format | str = "nf4",
    *,
    axis: int | Sequence[int] = -1,
    scales: Float[Array, "*lead blocks"] | None = None,
    offsets: Float[Array, "*lead blocks"] | None = None,
    check_finite: bool = True,
    precision: str | None = None,
    activations: str | None = None,
    compute: Compute | None = None,
) -> QuantizedArray:
    """Quantize an array.

    This is a pure function, and works under `jax.jit`, `jax.vmap` and `jax.eval_shape`.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (512, 256))
        quantized = eqquant.quantize(weight, "nf4")
        assert quantized.shape == (512, 256)
        assert quantized.nbytes < weight.nbytes / 7
        ```

    **Arguments:**

    - `array`: a floating-point array with one axis or more.
    - `format`: a format, or the name of one: `"nf4"`, `"nf3"`, `"nf2"`, `"fp8"`,
        `"mxfp4"`, `"nvfp4"`, `"int8"`, `"int4"`, `"int3"`, `"int2"`, `"ternary"`,
        `"binary"`, `"trellis2"`, `"trellis3"`, `"trellis4"`.
    - `axis`: the axis that shares a scale, or along which blocks run. Choose the
        contracted axis of products: the last axis for `w @ x`, as in `eqx.nn`, and the
        first axis for `x @ w`. Several axes share scales over all of them, for example
        in a convolution. With all axes and no block size, the whole array has one
        scale.
    - `scales`: `(*lead, blocks)`, for example learned scales. By default the format
        chooses scales. Every value takes its nearest level. Scales are positive;
        formats with asymmetric levels also accept negative scales. `lead` are the axes
        of `array` that are not blocked.
    - `offsets`: `(*lead, blocks)`, in addition to `scales`, for an affine format.
    - `check_finite`: raise an error if `array` contains a NaN, an infinity, or a value
        that is too large for the dtype of the scales.
    - `precision`, `activations`, `compute`: the settings of products with the result.
        `compute` is an [`eqquant.kernels.Compute`][], and the other two replace its
        fields.

    **Returns:**

    A [`eqquant.QuantizedArray`][] with the shape and dtype of `array`.

    **Raises:**

    - `TypeError` if `array` is not floating point.
    - `ValueError` if `format`, `axis` or the shape of `scales` is invalid, or if
        values of `array` are not finite; the message counts them. Under `jit`, the
        second check raises at run time, by `eqx.error_if`.
    """
    format = as_format(format, "quantize")
    compute = as_compute(compute, precision, activations)
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"quantize: array must have a floating-point dtype, got {array.dtype}."
        )
    if array.ndim == 0:
        raise ValueError("quantize: array must have at least one axis, got a scalar.")
    if format.scale_dtype == np.float64 and not config("jax_enable_x64"):
        raise ValueError(
            "quantize: scale_dtype='float64' needs jax_enable_x64, which is off."
        )
    axes = canonical_axes(axis, array.ndim)
    if not array.size:
        # An empty array needs no scales, and the shape can still be derived.
        axes = axes[-1:]
    given = None
    if (offsets is not None) != (format.has_offsets and scales is not None):
        raise ValueError(
            "quantize: offsets go with scales, for an affine format: give both, or "
            f"neither; got {'none' if offsets is None else 'some'} for {format!r}."
        )
    if scales is not None:
        _check_scales("scales", scales, array, axes, format)
        given = scales.astype(format.scale_dtype)
        if offsets is not None:
            _check_scales("offsets", offsets, array, axes, format)
            given = given, offsets.astype(format.scale_dtype)
    q, problem = encode(array, format, axes, given)
    if check_finite:
        zero = no_problem(problem, array, format, given)
        if zero is not None:
            # Attach the check to codes and scales, so that it runs if either is used.
            leaves, tree = jax.tree.flatten(q)
            q = jax.tree.unflatten(tree, [a + zero.astype(a.dtype) for a in leaves])
    return q.with_static(compute=compute)


def encode(
    array: Float[Array, "..."], format: Format, axes: tuple[int, ...], given: Any = None
) -> tuple[QuantizedArray, Bool[Array, ""]]:
    """Quantize an array after its arguments were checked.

    Also return whether some values cannot be quantized.
    """
    at_once = elements_at_once(array, format) if _is_on_one_device(array) else None
    if given is None and has_encoder(array, format, axes):
        codes, stored, problems = encode_rowwise(array, format, at_once)
        problem = jnp.any(problems)
    else:
        codes, stored, problem = encode_rows(array, format, axes, at_once, given)
    shape = array.shape
    inner = tuple(shape[a] for a in axes[1:])
    if per_tensor(axes, array.ndim, format):
        axes, inner = axes[-1:], ()
    size = math.prod(shape[a] for a in axes)
    padding = format.padded(size) - size
    scales, offsets = scales_and_offsets(stored, format)
    fields = format, array.dtype, axes, inner, padding
    q = QuantizedArray(codes, scales, *fields, offsets=offsets)
    return q, problem


def no_problem(
    problem: Bool[Array, ""],
    array: Float[Array, "..."],
    format: Format,
    given: Any = None,
) -> Float[Array, ""] | None:
    """Raise an error if there is a problem.

    Under `jit`, this returns a zero, and the error is raised when the zero is used.
    """
    if not is_traced(problem):
        if problem:
            _raise_not_finite(array, given, format)
        return None
    # Use a scalar, because arrays that pass through `error_if` lose their sharding.
    return eqx.error_if(
        jnp.zeros((), format.scale_dtype),
        problem,
        "eqquant.quantize: the array holds values that are not finite, or that "
        f"{format.scale_dtype.name} scales cannot hold; or a scale that was given is "
        "not positive and finite.",
    )


def _is_on_one_device(array: Array) -> bool:
    # A loop over sharded rows would gather them.
    if is_traced(array):
        return jax.device_count() == 1
    return len(array.sharding.device_set) == 1


def _check_scales(
    name: str,
    scales: Float[Array, "*lead blocks"],
    array,
    axes: tuple[int, ...],
    format: Format,
):
    if format.quantized_scales:
        raise ValueError(
            f"quantize: scales cannot be given to {format!r}, which quantizes them. "
            "Turn that off."
        )
    lead = [array.shape[a] for a in other_axes(array.ndim, axes)]
    size = math.prod(array.shape[a] for a in axes)
    expected = (*lead, format.num_blocks(size))
    if scales.shape != expected:
        raise ValueError(
            f"quantize: {name} must have the shape {expected} for an array of shape "
            f"{array.shape} in {format!r}, got {scales.shape}."
        )


def _raise_not_finite(array: Num[Array, "..."], given: Any, format: Format):
    given = None if given is None else scales_and_offsets(given, format)[0]
    kind = "nonzero" if format.signed_scales else "positive"
    nan = int(jnp.sum(jnp.isnan(array)))
    infinite = int(jnp.sum(jnp.isinf(array)))
    if nan or infinite:
        raise ValueError(
            f"quantize: array must be finite, but {nan} values are NaN and {infinite} "
            f"are infinite, out of {array.size}. Pass check_finite=False to quantize "
            "it all the same."
        )
    if given is not None and (wrong := int(jnp.sum(~is_a_scale(given, format)))):
        raise ValueError(
            f"quantize: scales must be {kind} and finite, but {wrong} out of "
            f"{given.size} are not."
        )
    raise ValueError(
        f"quantize: array holds values that scales in {format.scale_dtype.name} cannot "
        "hold. Choose scale_dtype='float64', or rescale the array."
    )
