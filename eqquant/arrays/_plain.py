"""The methods of an implicit array, for plain arrays: some code holds either kind."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from ..primitives import dense_dot
from ._implicit import is_implicit


def _dynamic_slice(x, start: Sequence[Any], sizes: Sequence[int]):
    starts = [jnp.asarray(i) for i in start]
    dtype = jnp.result_type(*starts)
    return lax.dynamic_slice(x, [i.astype(dtype) for i in starts], sizes)


def _concatenate(x, others: Sequence, dimension: int):
    return lax.concatenate([x, *others], dimension)


def scaled(x: Shaped[Array, "..."], factor: Shaped[Array, "..."], fn: Callable):
    return fn(x, jnp.broadcast_to(factor.astype(x.dtype), x.shape))


_plain: dict[str, Callable] = {
    "permute": lax.transpose,
    "with_dtype": lax.convert_element_type,
    "with_shape": lax.reshape,
    "broadcast_in_dim": lax.broadcast_in_dim,
    "slice": lax.slice,
    "dynamic_slice": _dynamic_slice,
    "reverse": lax.rev,
    "drop_axes": lax.squeeze,
    "concatenate": _concatenate,
    "scaled": scaled,
}


def apply(name: str, x, *args) -> Any:
    """`x.name(*args)`, of an array of either kind."""
    return getattr(x, name)(*args) if is_implicit(x) else _plain[name](x, *args)


def with_shape(x, shape: Sequence[int]) -> Any:
    """`ImplicitArray.with_shape`, of an array of either kind."""
    return apply("with_shape", x, shape)


def gather(
    fn: Callable[[Array, Any], Array], x: Shaped[Array, "..."], count: int, fill: Any
) -> Any:
    """`fn` of a plain array, so many of its axes flattened into the last."""
    kept = x.shape[x.ndim - count :]
    out = fn(x.reshape(*x.shape[: x.ndim - count], math.prod(kept)), fill)
    return out.reshape(*out.shape[:-1], *kept)


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
