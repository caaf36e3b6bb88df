"""Attention in plain JAX."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


# Bytes of keys that one step of a loop reads, and the least number of tokens.
_piece, _least = 2**16, 64
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


def attend_in_pieces(
    q: Float[Array, "batch heads 1 size"],
    keys: Float[Array, "layers all_heads size keys"],
    values: Float[Array, "layers all_heads keys size"],
    layer: Int[Array, ""],
    mask: Bool[Array, "1 1 keys"],
    cap: float | None,
    start: Int[Array, ""],
) -> Float[Array, "batch heads 1 size"]:
    """Compute attention for one token per sequence, at position `start`.

    Loops read the keys and values of earlier tokens in pieces from the stack.
    """
    _, count, size, capacity = keys.shape
    fits = _piece // (count * size * keys.dtype.itemsize)
    piece = math.gcd(capacity, max(1 << fits.bit_length() - 1 if fits else 0, _least))
    rows, pieces = q.reshape(count, -1, size), start // piece + 1
    product = lambda how, a, b: jnp.einsum(how, a, b, preferred_element_type="float32")

    def score(i, scores):
        where, shape = (layer, 0, 0, i * piece), (1, count, size, piece)
        some = product("hqd,hdk->hqk", rows, lax.dynamic_slice(keys, where, shape)[0])
        return lax.dynamic_update_slice(scores, some, (0, 0, i * piece))

    scores = jnp.zeros((*rows.shape[:2], capacity), jnp.float32)
    scores = softcap(lax.fori_loop(0, pieces, score, scores), cap)
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)).astype(q.dtype)

    def add(i, total):
        where, shape = (layer, 0, i * piece, 0), (1, count, piece, size)
        some = lax.dynamic_slice_in_dim(weights, i * piece, piece, 2)
        part = lax.dynamic_slice(values, where, shape)[0]
        return total + product("hqk,hkd->hqd", some, part)

    total = lax.fori_loop(0, pieces, add, jnp.zeros(rows.shape, jnp.float32))
    return total.astype(q.dtype).reshape(q.shape)
