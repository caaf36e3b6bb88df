"""The methods of an implicit array, for plain arrays: some code holds either kind."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from ..primitives import dense_dot
from ._implicit import is_implicit


def scaled(x, factor: Shaped[Array, "..."], fn: Callable) -> Any:
    """`ImplicitArray.scaled`, of an array of either kind."""
    if is_implicit(x):
        return x.scaled(factor, fn)
    return fn(x, jnp.broadcast_to(factor.astype(x.dtype), x.shape))


def with_shape(x, shape: Sequence[int]) -> Any:
    """`ImplicitArray.with_shape`, of an array of either kind."""
    return x.with_shape(shape) if is_implicit(x) else lax.reshape(x, shape)


def contract(
    w, x, over, batch=(), *, precision: Any = None, out_dtype=None, out_sharding=None
) -> Any:
    """`ImplicitArray.contract`, of an array of either kind."""
    how: dict[str, Any] = {"precision": precision, "out_sharding": out_sharding}
    if is_implicit(w):
        return w.contract(x, over, batch, out_dtype=out_dtype, **how)
    dtype = jnp.promote_types(w.dtype, x.dtype)
    w, x = w.astype(dtype), x.astype(dtype)
    swapped: Any = [
        tuple(zip(*((j, i) for i, j in pairs), strict=True)) or ((), ())
        for pairs in (over, batch)
    ]
    # The order of the operands is no different for a vector, which goes on the right:
    # XLA:CPU transposes a matrix to have it there.
    is_vector = x.ndim == len(over) + len(batch)
    how |= {"weight_first": is_vector, "preferred_element_type": out_dtype}
    return dense_dot(x, w, swapped, **how)
