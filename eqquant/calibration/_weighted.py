"""Scales and offsets fitted to the data, for formats without GPTQ support."""

from typing import TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..arrays import encode, in_blocks, MatrixAxes, QuantizedArray
from ..formats import FittedFormat, Format
from ._gptq import largest_magnitude, row_losses


def can_weigh(format: Format) -> TypeGuard[FittedFormat]:
    """Return whether a format fits floating-point scales and offsets, so that errors of
    values can be weighted."""
    fits = isinstance(format, FittedFormat) and format.affine and format.fit != "absmax"
    return fits and not format.quantized_scales


def weighted(
    array: Float[Array, "..."],
    plain: QuantizedArray,
    gram: Float[Array, "*lead size size"],
    axes: MatrixAxes,
) -> QuantizedArray:
    """Quantize `array` to the format of `plain`, with weighted errors.

    `plain` is the array rounded to nearest. The weight of an error is the mean square
    of its input. Each row of the result is the better of both on the calibration data,
    whose Gram matrix is `gram`.
    """
    shape, format = array.shape, plain.format
    assert can_weigh(format)
    weights = axes.as_matrices(jnp.asarray(array).astype(jnp.float32))
    largest = largest_magnitude(weights)
    grams = gram.reshape(-1, *gram.shape[-2:])
    squares = jnp.diagonal(grams, axis1=-2, axis2=-1)
    limit = float(jnp.finfo(array.dtype).max)
    fit_row = lambda row, squares: _fit(row, squares, format, limit)
    fitted = jax.vmap(jax.vmap(fit_row, (0, None)))(weights, squares)

    def stored(parts):
        return jax.tree.map(lambda p: axes.scales_from_matrices(p, shape), parts)

    def loss(q: QuantizedArray):
        decoded = axes.as_matrices(q.dequantize().astype(jnp.float32))
        return row_losses((decoded - weights) / largest, grams)

    new, _ = encode(array, format, plain.axes, stored(fitted))
    better = (loss(new) < loss(plain))[..., None]
    old = plain.scales, plain.offsets
    old = jax.tree.map(lambda part: axes.scales_as_matrices(part, shape), old)
    best = jax.tree.map(lambda a, b: jnp.where(better, a, b), fitted, old)
    return encode(array, format, plain.axes, stored(best))[0]


def _fit(
    row: Float[Array, " size"],
    importance: Float[Array, " size"],
    format: FittedFormat,
    limit: float,
):
    """Return the scales and offsets of a row."""
    blocks, counts = in_blocks(row, format)
    importance, _ = in_blocks(importance, format)
    # Only relative weights matter, and large weights could overflow.
    largest = jnp.max(importance, -1, keepdims=True)
    importance = importance / jnp.where(largest > 0, largest, 1)
    absmax = jnp.max(jnp.abs(blocks), -1)
    _, parts = format.encode(blocks, absmax, counts, limit, importance)
    return parts
