"""Primitives that replace rows: new rows are quantized, and all others are unchanged.

So a loop can carry a quantized array as a cache, and append to it.
"""

from jax import lax

from ...arrays import ImplicitArray
from ._registry import rule_for


@rule_for(lax.dynamic_update_slice_p)
def _dynamic_update_slice(q, rows, *start):
    if not isinstance(q, ImplicitArray) or isinstance(rows, ImplicitArray):
        return NotImplemented
    return q.update(rows, start)  # The equation has adjusted negative starts already.
