"""A search for the rounding of one block of GPTQ: the M-algorithm.

GPTQ rounds each value to the nearest level, although the other neighbouring level can
lead to smaller errors later. The M-algorithm (Anderson and Mohan, IEEE Transactions on
Communications 32, 1984) keeps several roundings of a row, each with its own error
feedback.
"""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ..formats import Format


# The number of neighbouring levels that a search tries for each value.
_near = 2
# The number of roundings in memory. Rows are processed in groups of this number.
_at_once = 2**15


def is_searchable(format: Format) -> bool:
    """Return whether a search can pay. With eight bits, rounding errors are small."""
    return format.bits < 8


def searched(
    columns: Float[Array, "width rows"],
    scales: Float[Array, " rows"],
    factor: Float[Array, "width width"],
    format: Format,
    count: int,
) -> tuple[Float[Array, "width rows"], Float[Array, "width rows"]]:
    """Return the rounded values of a block, and their errors divided by the diagonal of
    the factor.

    The search keeps `count` roundings of a row. `factor` is the part of the factor of
    [`inverse_factor`][] for this block.
    """
    with jax.ensure_compile_time_eval():
        codes = np.setdiff1d(np.arange(2**format.bits), format.unused_codes)
        levels = format.levels(jnp.asarray(codes, format.code_dtype), jnp.float32)
        table = np.unique(np.asarray(levels))
    search = ft.partial(_search_row, factor=factor, table=table, count=count)
    of_row = lambda inputs: search(*inputs)
    size = max(1, _at_once // count)
    values, errors = lax.map(of_row, (columns.T, scales), batch_size=size)
    return values.T, errors.T


def _search_row(
    row: Float[Array, " width"],
    scale: Float[Array, ""],
    factor: Float[Array, "width width"],
    table: Float[np.ndarray, " levels"],
    count: int,
) -> tuple[Float[Array, " width"], Float[Array, " width"]]:
    width, levels, near = len(row), jnp.asarray(table), min(_near, len(table))
    divisor = jnp.where(scale == 0, 1, scale)

    def step(carry, j):
        residual, cost = carry
        x = residual[j]
        above = jnp.sum((x / divisor)[:, None] > levels, -1)
        first = jnp.clip(above - near // 2, 0, len(table) - near)
        values = levels[first[:, None] + jnp.arange(near)] * scale
        errors = (x[:, None] - values) / factor[j, j]
        # Relative to the scale, so that squares neither overflow nor underflow.
        costs = cost[:, None] + jnp.square(errors / divisor)
        cost, chosen = lax.top_k(-costs.ravel(), count)
        parents, error = chosen // near, errors.ravel()[chosen]
        after = jnp.where(jnp.arange(width) > j, factor[j], 0)
        residual = residual[:, parents] - after[:, None] * error
        return (residual, -cost), (parents, values.ravel()[chosen], error)

    def back(path, kept):
        parents, value, error = kept
        return parents[path], (value[path], error[path])

    # At first, all paths but one are copies, which cost more than every other path.
    cost = jnp.where(jnp.arange(count) == 0, 0.0, jnp.inf)
    start = jnp.broadcast_to(row[:, None], (width, count)), cost
    (_, cost), kept = lax.scan(step, start, jnp.arange(width))
    _, best = lax.scan(back, jnp.argmin(cost), kept, reverse=True)
    return best
