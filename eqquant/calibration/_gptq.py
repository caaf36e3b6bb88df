"""GPTQ (arXiv 2210.17323): column-wise rounding with error feedback."""

import functools as ft
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ..arrays import encode, MatrixAxes, QuantizedArray
from ..formats import float_scales, Format, ShortScales
from ._search import num_paths, searched


# With large outliers among the inputs, small damping would fit noise.
_heavy_tail = 100.0
_damping, _damping_of_heavy_tails = 0.01, 0.1
# Columns per error update, for formats without blocks.
_columns = 128


def row_losses(
    error: Float[Array, "*stack rows size"], gram: Float[Array, "*stack size size"]
) -> Float[Array, "*stack rows"]:
    """Return the sum of squared products of each row with the calibration data."""
    return jnp.sum(jnp.matmul(error, gram, precision="highest") * error, -1)


def largest_magnitude(weights: Float[Array, "..."]) -> Float[Array, ""]:
    """Return the largest magnitude of an array, or 1. Squares of errors divided by it
    do not underflow."""
    largest = jnp.max(jnp.abs(weights), initial=0).astype(jnp.float32)
    return jnp.where(largest > 0, largest, 1)


def has_nearest(format: Format) -> bool:
    """Return whether GPTQ supports a format: it needs `nearest`, and no offsets."""
    return type(format).nearest is not Format.nearest and not format.has_offsets


def gptq(
    array: Float[Array, "..."],
    plain: QuantizedArray,
    gram: Float[Array, "*lead size size"],
    factors: Sequence[Float[Array, "size size"]],
    axes: MatrixAxes,
    search: int = 1,
) -> QuantizedArray:
    """Quantize `array` to the format of `plain` by GPTQ.

    `plain` is the array rounded to nearest. Each row of the result is the better of
    both on the calibration data, whose Gram matrix is `gram`. `factors` are the results
    of [`inverse_factor`][] for each matrix. `search` is the number of roundings of
    a row that are kept in a block.
    """
    shape, format = array.shape, plain.format
    weights = axes.as_matrices(jnp.asarray(array).astype(jnp.float32))
    rounded = axes.as_matrices(plain.dequantize().astype(jnp.float32))
    scales = jax.tree.map(
        lambda part: axes.scales_as_matrices(part, shape), plain.scales
    )
    packed = axes.scales_as_matrices(plain.codes, shape) if format.history else None
    grams = gram.reshape(-1, *gram.shape[-2:])
    limit = float(jnp.finfo(array.dtype).max)
    results = []
    for i in range(weights.shape[0]):  # One at a time, to save memory.
        own = jax.tree.map(operator.itemgetter(i), (rounded, scales, packed))
        result = _round_better(
            weights[i], *own, grams[i], factors[i], format, limit, search
        )
        results.append(result)
    values, new, codes = jax.tree.map(lambda *parts: jnp.stack(parts), *results)
    given = axes.scales_from_matrices(new, shape).astype(format.scale_dtype)
    if codes is not None:
        # Finding codes with a history again would take longer than the search.
        codes = axes.scales_from_matrices(codes, shape)
        return plain.replace(codes=codes, scales=given)
    # Each value is a level times its scale, so encoding is exact.
    decoded = axes.from_matrices(values, shape)
    q, _ = encode(decoded, format, plain.axes, given)
    stored = q.scales
    if isinstance(plain.scales, ShortScales):
        stored = plain.scales.nearest(stored.astype(jnp.float32))
    return plain.replace(codes=q.codes, scales=stored)


class Factors:
    """The factors of Gram matrices. The last ones are kept, because weights with the
    same inputs, such as query, key and value, have equal matrices."""

    def __init__(self):
        self._gram: np.ndarray | None = None
        self._rotation = 1
        self._factors: list[Float[Array, "size size"]] = []

    def __call__(
        self,
        gram: Float[Array, "*lead size size"],
        rotation: int,
        rotated: Float[Array, "*lead size size"],
    ) -> list[Float[Array, "size size"]]:
        """Return the factor of each matrix in `rotated`, which is `gram` after a
        rotation by blocks of `rotation` values."""
        new = np.asarray(gram)
        is_last = self._gram is not None and np.array_equal(new, self._gram)
        if not is_last or rotation != self._rotation:
            matrices = np.asarray(rotated).reshape(-1, *new.shape[-2:])
            factors = map(inverse_factor, matrices)
            self._factors = [jnp.asarray(factor, jnp.float32) for factor in factors]
            self._gram, self._rotation = new, rotation
        return self._factors


def inverse_factor(gram: Float[np.ndarray, "size size"]) -> np.ndarray:
    """Return the upper triangular `U` whose `U^T U` is the inverse of the damped
    matrix.

    The computation is in float64. Columns without input are treated as independent. The
    damping grows tenfold until the matrix is positive definite.
    """
    gram = np.array(gram, np.float64)
    diagonal = np.maximum(np.diagonal(gram), 0)
    dead = diagonal <= 0
    mean = diagonal.mean() or 1.0
    median = np.median(diagonal[~dead]) if not dead.all() else 1.0
    is_heavy = diagonal.max() > _heavy_tail * median
    damping = _damping_of_heavy_tails if is_heavy else _damping
    # The reversed Cholesky factor gives the factor of the inverse without the inverse.
    while True:
        np.fill_diagonal(gram, np.where(dead, mean, diagonal) + damping * mean)
        try:
            lower = np.linalg.cholesky(gram[::-1, ::-1])
            break
        except np.linalg.LinAlgError:
            damping *= 10
    inverse = _invert_lower(lower)
    return np.ascontiguousarray(inverse[::-1, ::-1])


def conditional_variances(gram: Float[np.ndarray, "size size"]):
    """Return the variance of each input that later inputs do not explain.

    GPTQ leaves this share of the error of a column, because later columns compensate
    for the rest.
    """
    return np.diagonal(inverse_factor(gram)) ** -2.0


def _invert_lower(lower: np.ndarray) -> np.ndarray:
    """Invert a lower triangular matrix recursively, by matrix products."""
    size = len(lower)
    if size <= 64:
        return np.tril(np.linalg.inv(lower))
    half = size // 2
    first, second = (
        _invert_lower(lower[:half, :half]),
        _invert_lower(lower[half:, half:]),
    )
    out = np.zeros_like(lower)
    out[:half, :half], out[half:, half:] = first, second
    out[half:, :half] = -second @ lower[half:, :half] @ first
    return out


@ft.partial(jax.jit, static_argnames=("format", "limit", "search"))
def _round_better(
    weights,
    rounded,
    scales,
    packed,
    gram,
    factor,
    format: Format,
    limit: float,
    search: int,
):
    """Return decoded values, scales, and for a format with a history packed codes.

    `rounded`, `scales` and `packed` are the result of rounding to nearest.
    """
    values, new, codes = _round(weights, scales, factor, format, limit, search)

    largest = largest_magnitude(weights)
    loss = lambda values: row_losses((values - weights) / largest, gram)
    better = (loss(values) < loss(rounded))[:, None]
    old = float_scales(scales).astype(jnp.float32)
    values, new = jnp.where(better, values, rounded), jnp.where(better, new, old)
    if codes is not None:
        own = format.pack(codes).reshape(packed.shape)
        codes = jnp.where(better, own, packed)
    return values, new, codes


def _round(
    weights: Float[Array, "rows size"],
    scales: Float[Array, "rows blocks"] | ShortScales,
    factor: Float[Array, "size size"],
    format: Format,
    limit: float,
    search: int,
):
    """Return decoded values, their scales, and for a format with a history the codes
    of blocks.

    The scale of a block is chosen after all earlier blocks are rounded and their errors
    compensated. `scales` are for formats whose blocks share a scale, or a part of it.
    """
    rows, size = weights.shape
    paths = num_paths(format, search)
    width = format.block_size or min(_columns, size)
    count = math.ceil(size / width)
    padded = count * width
    # Columns come first, so that they are contiguous.
    columns = jnp.pad(weights, ((0, 0), (0, padded - size))).T
    factor = jnp.pad(factor, ((0, padded - size),) * 2)
    factor = factor + jnp.diag((jnp.arange(padded) >= size).astype(factor.dtype))

    def scale_of(block, i, filled: int):
        if format.block_size is None:
            return float_scales(scales).astype(jnp.float32)
        absmax = jnp.max(jnp.abs(block), 0)[:, None]
        counts = np.full(1, width - filled, np.float32)
        stored = format.choose_scales(block.T[:, None, :], absmax, counts, limit)
        new = float_scales(stored).astype(jnp.float32)
        if not isinstance(scales, ShortScales):
            return new
        new = scales.nearest(jnp.broadcast_to(new, scales.shape))
        return lax.dynamic_slice_in_dim(new.astype(jnp.float32), i, 1, 1)

    def round_block(columns, i, filled: int = 0):
        start = i * width
        block = lax.dynamic_slice_in_dim(columns, start, width, 0)
        across = lax.dynamic_slice_in_dim(factor, start, width, 0)
        within = lax.dynamic_slice_in_dim(across, start, width, 1)
        scale = scale_of(block, i, filled)

        def round_column(j, carry):
            block, values, errors = carry
            column = block[j]
            code = format.nearest(column[:, None, None], scale)
            level = format.levels(code.astype(format.code_dtype), jnp.float32)
            value = level[:, 0, 0] * scale[:, 0]
            error = (column - value) / within[j, j]
            after = jnp.where(jnp.arange(width) > j, within[j], 0)
            block = block - after[:, None] * error[None]
            return block, values.at[j].set(value), errors.at[j].set(error)

        codes = None
        if paths > 1:
            found = searched(block, scale[:, 0], within, format, paths)
            values, errors = found.values, found.errors
            codes = found.codes.T if format.history else None
        else:
            empty = jnp.zeros_like(block)
            start_of = block, empty, empty
            _, values, errors = lax.fori_loop(0, width, round_column, start_of)
        after = jnp.where(jnp.arange(padded) >= start + width, across, 0)
        spread = jnp.matmul(after.T, errors, precision="highest")
        return columns - spread, (values, scale[:, 0], codes)

    full = size // width
    columns, blocks = lax.scan(round_block, columns, jnp.arange(full))
    if padded > size:  # The last block is partial.
        _, last = round_block(columns, jnp.asarray(full), padded - size)
        blocks = jax.tree.map(
            lambda parts, part: jnp.concatenate([parts, part[None]]), blocks, last
        )
    values, new, codes = blocks
    values = values.reshape(padded, rows).T[:, :size]
    if codes is not None:
        codes = codes.swapaxes(0, 1)  # (rows, blocks, width)
    new = float_scales(scales) if format.block_size is None else new.T
    return values, new, codes
