"""Random keys inside of implicit arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import ImplicitArray


def split_key(key: Any, shape: Sequence[int]) -> Any:
    """Return a key for each matrix of a stack, or None without a key."""
    if key is None:
        return None
    return jax.random.split(key, tuple(shape)) if shape else key


def renew_keys(renew: Callable, model: Any, key: Any, unused: str) -> Any:
    """Replace the keys in a model. `renew(leaf, key_of)` calls `key_of` for a key of
    its own.

    Raise a `ValueError` with the message `unused` if a key is given, and no leaf needs
    one.
    """
    if key is not None and jnp.issubdtype(key.dtype, jnp.uint32):
        key = jax.random.wrap_key_data(key)
    count = 0

    def next_key():
        nonlocal count
        count += 1
        return None if key is None else jax.random.fold_in(key, count)

    out = jax.tree.map(lambda x: renew(x, next_key), model, is_leaf=_is_implicit)
    if not count and key is not None:
        raise ValueError(unused)
    return out


def _is_implicit(x: Any) -> bool:
    # Also an array that lacks parts, because `eqx.partition` removed them.
    return isinstance(x, ImplicitArray)
