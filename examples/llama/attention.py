"""Attention in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


# The scores of all queries of a long prompt would exceed every cache.
_at_once = 128


def softcap(x: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    return x if cap is None else cap * jnp.tanh(x / cap)


def attend(
    q: Float[Array, "batch heads length size"],
    k: Float[Array, "all_heads size keys"],
    v: Float[Array, "all_heads keys size"],
    mask: Bool[Array, "batch length keys"],  # A batch of 1 broadcasts.
    cap: float | None,
    in_turns: bool = False,
) -> Float[Array, "batch heads length size"]:
    """Compute attention. Queries are scaled already.

    The head axes of keys and values cover all sequences. Each key head serves the same
    number of query heads. With `in_turns`, a loop over groups of queries saves memory.
    """
    batch, heads, length, size = q.shape

    def of_some(q, mask):
        # Queries that share a key are rows of one product, so that no key is repeated.
        rows = q.reshape(len(k), -1, size)
        scores = jnp.einsum("hqd,hdk->hqk", rows, k, preferred_element_type=jnp.float32)
        # XLA for TPU may otherwise compute scores twice, and read the keys twice.
        scores = lax.optimization_barrier(scores) if in_turns else scores
        scores = softcap(scores, cap)
        by_sequence = scores.reshape(batch, heads, *mask.shape[1:])
        weights = jax.nn.softmax(jnp.where(mask[:, None], by_sequence, -jnp.inf))
        weights = weights.reshape(scores.shape).astype(q.dtype)
        return jnp.einsum("hqk,hkd->hqd", weights, v).reshape(q.shape)

    if not in_turns or length <= _at_once or length % _at_once:
        return of_some(q, mask)
    q = q.reshape(batch, heads, -1, _at_once, size)
    mask = mask.reshape(len(mask), -1, _at_once, mask.shape[-1])
    pieces = jnp.moveaxis(q, 2, 0), jnp.moveaxis(mask, 1, 0)
    y = lax.map(lambda piece: of_some(*piece), pieces)
    return jnp.moveaxis(y, 0, 2).reshape(batch, heads, length, size)
