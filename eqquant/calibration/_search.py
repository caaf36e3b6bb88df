"""A search for the rounding of one block of GPTQ: the M-algorithm.

GPTQ rounds each value to the nearest level, although the other neighbouring level can
lead to smaller errors later. If a level depends on earlier codes, there is no greedy
rounding. The M-algorithm (Anderson and Mohan, IEEE Transactions on
Communications 32, 1984) keeps several roundings of a row, each with its own error
feedback.
"""

import functools as ft
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from ..formats import Format
from ..kernels import cpu


# The number of neighbouring levels that a search tries for each value.
_near = 2
# The number of roundings in memory. Rows are processed in groups of this number.
_at_once = 2**15


# The default number of roundings of a row, if a level depends on earlier codes.
_paths = 32


def num_paths(format: Format, search: int) -> int:
    """Return the number of roundings of a row that a search keeps; 1 for none."""
    if format.history:
        return search if search > 1 else _paths
    # With eight bits, rounding errors are small.
    return search if format.bits < 8 else 1


class Found(NamedTuple):
    """The rounding of a block that a search chose.

    **Fields:**

    - `values`: the rounded values.
    - `errors`: their errors, divided by the diagonal of the factor.
    - `codes`: their codes; without a history, the indices of their levels in ascending
        order.
    """

    values: Float[Array, "width rows"]
    errors: Float[Array, "width rows"]
    codes: UInt8[Array, "width rows"]


def searched(
    columns: Float[Array, "width rows"],
    scales: Float[Array, " rows"],
    factor: Float[Array, "width width"],
    format: Format,
    count: int,
) -> Found:
    """Search for the rounding of a block, and keep `count` roundings of a row. `factor`
    is the part of the factor of [`inverse_factor`][] for this block."""
    levels = _levels(format)
    in_jax = ft.partial(_search, format=format, levels=levels, count=count)
    if not cpu.searches(format.code_bits):
        return in_jax(columns, scales, factor)

    def natively(columns, scales, factor):
        # No rounding reaches the levels that fill the table.
        filled = np.full(
            2 ** (format.code_bits * (format.history + 1)), 1e30, np.float32
        )
        filled[: len(levels)] = levels
        args = columns.T, scales, factor, jnp.asarray(filled)
        found = cpu.search(*args, bits=format.code_bits, count=count)
        return Found(*(part.T for part in found))

    return lax.platform_dependent(columns, scales, factor, cpu=natively, default=in_jax)


def _levels(format: Format) -> np.ndarray:
    """Return the level of each state, or without a history the levels in order."""
    with jax.ensure_compile_time_eval():
        if format.history:
            states = jnp.arange(2 ** (format.bits * (format.history + 1)))
            return np.asarray(format.levels(states, jnp.float32))
        levels = format.levels(jnp.asarray(format.used_codes), jnp.float32)
        return np.unique(np.asarray(levels))


def _search(columns, scales, factor, *, format: Format, levels, count: int):
    """Implement [`searched`][] in JAX."""
    branch = (_after_history if format.history else _near_levels)(format, levels)
    search = ft.partial(_search_row, factor=factor, branch=branch, count=count)
    of_row = lambda inputs: search(*inputs)
    size = max(1, _at_once // count)
    values, errors, states = lax.map(of_row, (columns.T, scales), batch_size=size)
    # The highest bits of a state are the newest code.
    codes = (states >> format.code_bits * format.history).astype(jnp.uint8)
    return Found(values.T, errors.T, codes.T)


def _near_levels(format: Format, table: np.ndarray) -> Callable:
    """Return a function from states and values to the next states and their levels:
    the levels of a table next to each value."""
    del format
    levels, near = jnp.asarray(table), min(_near, len(table))

    def branch(_, x):
        above = jnp.sum(x[:, None] > levels, -1)
        first = jnp.clip(above - near // 2, 0, len(table) - near)
        states = first[:, None] + jnp.arange(near)
        return states, levels[states]

    return branch


def _after_history(format: Format, levels: np.ndarray) -> Callable:
    """Like [`_near_levels`][], for the levels that can follow each state."""
    kept, table = format.bits * format.history, jnp.asarray(levels)

    def branch(state, _):
        states = (state >> format.bits)[:, None] | (jnp.arange(2**format.bits) << kept)
        return states, table[states]

    return branch


def _search_row(
    row: Float[Array, " width"],
    scale: Float[Array, ""],
    factor: Float[Array, "width width"],
    branch: Callable,
    count: int,
) -> tuple[Float[Array, " width"], Float[Array, " width"], Int[Array, " width"]]:
    """Return values, errors and states."""
    width = len(row)
    divisor = jnp.where(scale == 0, 1, scale)

    def step(carry, j):
        residual, cost, state = carry
        x = residual[j]
        states, levels = branch(state, x / divisor)
        values = levels * scale
        errors = (x[:, None] - values) / factor[j, j]
        # Relative to the scale, so that squares neither overflow nor underflow.
        costs = cost[:, None] + jnp.square(errors / divisor)
        cost, chosen = lax.top_k(-costs.ravel(), count)
        parents, error = chosen // levels.shape[-1], errors.ravel()[chosen]
        after = jnp.where(jnp.arange(width) > j, factor[j], 0)
        residual = residual[:, parents] - after[:, None] * error
        state = states.ravel()[chosen]
        kept = parents, values.ravel()[chosen], error, state
        return (residual, -cost, state), kept

    def back(path, kept):
        parents, *parts = kept
        return parents[path], tuple(part[path] for part in parts)

    # At first, all paths but one are copies, which cost more than every other path.
    cost = jnp.where(jnp.arange(count) == 0, 0.0, jnp.inf)
    state = jnp.zeros(count, jnp.int32)
    start = jnp.broadcast_to(row[:, None], (width, count)), cost, state
    (_, cost, _), kept = lax.scan(step, start, jnp.arange(width))
    _, best = lax.scan(back, jnp.argmin(cost), kept, reverse=True)
    return best
