"""Matrix products of an implicit array."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from ._contraction import Contraction
from ._implicit import ImplicitArray
from ._partition import hint_for_parts


def matmul(q: ImplicitArray, x: Shaped[Array, "..."], *, reflected: bool):
    """Return `q @ x`, or `x @ q` if reflected, like `jnp.matmul`."""
    name = f"{q.shape} @ {x.shape}" if not reflected else f"{x.shape} @ {q.shape}"
    if q.ndim == 0 or x.ndim == 0:
        raise ValueError(f"matmul: operands need at least one axis, got {name}.")
    # The contracted axes: the last axis of the left operand, and the second to last
    # axis of the right operand.
    q_axis = q.ndim - 1 if not reflected else max(q.ndim - 2, 0)
    x_axis = x.ndim - 1 if reflected else max(x.ndim - 2, 0)
    if q.shape[q_axis] != x.shape[x_axis]:
        hint = hint_for_parts()
        raise ValueError(f"matmul: contracted axes differ in size: {name}.{hint}")
    out_dtype = jnp.promote_types(q.dtype, x.dtype)

    q_batch, x_batch = q.shape[:-2], x.shape[:-2]
    if not q_batch:
        out = q.contract(x, Contraction([(q_axis, x_axis)], out_dtype=out_dtype))
        if out is NotImplemented or reflected or q.ndim == 1 or x.ndim == 1:
            return out
        return jnp.swapaxes(out, -1, -2)  # (..., columns of x, rows of q)

    shape = jnp.broadcast_shapes(q_batch, x_batch)
    q = q.broadcast_to((*shape, *q.shape[-2:]))
    if q is NotImplemented:
        return NotImplemented
    q_axis = q.ndim - 2 if reflected else q.ndim - 1
    if x.ndim == 1:
        return q.contract(x, Contraction([(q_axis, 0)], out_dtype=out_dtype))
    x = jnp.broadcast_to(x, (*shape, *x.shape[-2:]))
    x_axis = x.ndim - 1 if reflected else x.ndim - 2
    batch = [(i, i) for i in range(len(shape))]
    out = q.contract(x, Contraction([(q_axis, x_axis)], batch, out_dtype=out_dtype))
    if out is NotImplemented or reflected:
        return out
    return jnp.swapaxes(out, -1, -2)
