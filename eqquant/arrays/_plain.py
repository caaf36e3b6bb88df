"""Methods of implicit arrays, as functions that also accept plain arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from ..partition import dense_dot
from ._contraction import Contraction
from ._implicit import is_implicit


def scaled(x, factor: Shaped[Array, "..."], fn: Callable) -> Any:
    """Return `ImplicitArray.scaled`, for implicit and plain arrays."""
    if is_implicit(x):
        return x.scaled(factor, fn)
    return fn(x, jnp.broadcast_to(factor.astype(x.dtype), x.shape))


def with_shape(x, shape: Sequence[int]) -> Any:
    """Return `ImplicitArray.with_shape`, for implicit and plain arrays."""
    return x.with_shape(shape) if is_implicit(x) else lax.reshape(x, shape)


def contract(w, x, contraction: Contraction, vector_first: bool = False) -> Any:
    """Return `ImplicitArray.contract`, for implicit and plain arrays.

    With `vector_first`, `jax.vmap` over a vector `x` returns rows of results that are
    contiguous, so that nothing is transposed between two products of many rows. It
    takes longer for a single vector and a plain array.
    """
    if is_implicit(w):
        return w.contract(x, contraction)
    dtype = jnp.promote_types(w.dtype, x.dtype)
    w, x = w.astype(dtype), x.astype(dtype)
    swapped: Any = [
        tuple(zip(*((j, i) for i, j in pairs), strict=True)) or ((), ())
        for pairs in (contraction.over, contraction.batch)
    ]
    # For a vector the order of results does not matter, and the vector goes on the
    # right: otherwise XLA:CPU transposes the matrix.
    is_vector = x.ndim == len(contraction.over) + len(contraction.batch)
    return dense_dot(
        x,
        w,
        swapped,
        weight_first=is_vector and not vector_first,
        precision=contraction.precision,
        preferred_element_type=contraction.out_dtype,
        out_sharding=contraction.out_sharding,
    )
