"""Primitives that replace rows: new rows are quantized, and all others are unchanged.

So a loop can carry a quantized array as a cache, and append to it.
"""

import functools as ft

import jax.numpy as jnp
from jax import lax

from ...arrays import ImplicitArray
from ._registry import register_names, rule_for


@rule_for(lax.dynamic_update_slice_p)
def _dynamic_update_slice(q, rows, *start):
    if not isinstance(q, ImplicitArray) or isinstance(rows, ImplicitArray):
        return NotImplemented
    lead = [start[axis] for axis in range(q.ndim) if axis not in q.blocked_axes]
    dtype = jnp.result_type(*start)
    first = [jnp.asarray(i, dtype) for i in (*lead, 0)]
    # The equation has adjusted negative starts already.
    update = ft.partial(
        lax.dynamic_update_slice, start_indices=first, allow_negative_indices=False
    )
    return q.put(rows, update)


@register_names("scatter")
def _scatter(
    q,
    indices,
    rows,
    *,
    dimension_numbers,
    indices_are_sorted,
    unique_indices,
    mode,
):
    """Evaluate `q.at[indices].set(rows)` for whole rows."""
    numbers = dimension_numbers
    if not isinstance(q, ImplicitArray) or isinstance(rows, ImplicitArray):
        return NotImplemented
    n = q.whole_axes
    if n is None:
        return NotImplemented
    whole = set(range(q.ndim - n, q.ndim))
    indexed = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    if whole & (indexed | {*numbers.scatter_dims_to_operand_dims}):
        return NotImplemented
    # The window keeps the order of its axes, so the whole axes are last.
    window = numbers.update_window_dims
    if window[len(window) - n :] != tuple(range(rows.ndim - n, rows.ndim)):
        return NotImplemented
    numbers = numbers._replace(
        update_window_dims=(*window[: len(window) - n], rows.ndim - n)
    )

    def scatter(part, new):
        return lax.scatter(
            part,
            indices,
            new,
            numbers,
            indices_are_sorted=indices_are_sorted,
            unique_indices=unique_indices,
            mode=mode,
        )

    return q.put(rows, scatter)
