"""Logits of a few positions at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


# The number of positions whose logits exist at the same time.
AT_ONCE = 256


def rows_of(hidden: Float[Array, "*lead size"]) -> Float[Array, "positions size"]:
    return hidden.reshape(-1, hidden.shape[-1])


def mean_over_pieces(
    fn: Callable[[Any], Float[Array, ""]], parts: Any
) -> Float[Array, ""]:
    """Return the mean over positions of `fn(piece)`, a mean over the positions of a
    piece. The backward pass recomputes each piece.

    `parts` is a pytree of arrays with the positions as their first axis.
    """
    fn = jax.checkpoint(fn)
    count = len(jax.tree.leaves(parts)[0])
    whole = count // AT_ONCE
    end, total = whole * AT_ONCE, jnp.zeros(())
    if whole:
        split = lambda x: x[:end].reshape(whole, AT_ONCE, *x.shape[1:])
        total += AT_ONCE * jnp.sum(lax.map(fn, jax.tree.map(split, parts)))
    if end < count:
        total += (count - end) * fn(jax.tree.map(lambda x: x[end:], parts))
    return total / count
