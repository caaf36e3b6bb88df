"""Primitives that replace rows: new rows are quantized, and all others are unchanged.

So a loop can carry a quantized array as a cache, and append to it.
"""

import functools as ft

import jax.numpy as jnp
from jax import lax

from ...arrays import ImplicitArray
from ._registry import rule_for


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
