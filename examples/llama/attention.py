"""Attention in plain JAX."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


# Bytes of keys or values that one step of a loop reads at most, and the number of
# tokens that it reads at the end.
_piece, _last = 2**16, 64
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
        y = jnp.einsum("hqk,hkd->hqd", weights, v)
        return y.astype(q.dtype).reshape(q.shape)

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

    Loops read the keys and values of earlier tokens in pieces from the stack. A piece
    belongs to one head, so that its rows are long. The last tokens are read from
    several heads at once.
    """
    _, count, size, capacity = keys.shape
    fits = max(_piece // (size * keys.dtype.itemsize), 1)  # Tokens of one head.
    most, last = min(fits, capacity), math.gcd(capacity, _last)
    some = max(n for n in range(1, count + 1) if count % n == 0 and n * last <= fits)
    whole = (start + 1) // most
    end = whole * most
    runs = (1, most, 0, whole), (some, last, end, (start - end) // last + 1)
    rows = q.reshape(count, -1, size)
    product = lambda how, a, b: jnp.einsum(how, a, b, preferred_element_type="float32")

    def for_each_piece(fn, carry):
        for heads, tokens, first, pieces in runs:

            def step(i, carry, heads=heads, tokens=tokens, first=first):
                groups = count // heads
                where = i % groups * heads, first + i // groups * tokens
                return fn(*where, heads, tokens, carry)

            carry = lax.fori_loop(0, count // heads * pieces, step, carry)
        return carry

    def score(head, token, heads, tokens, scores):
        shape = 1, heads, size, tokens
        piece = lax.dynamic_slice(keys, (layer, head, 0, token), shape)[0]
        queries = lax.dynamic_slice_in_dim(rows, head, heads)
        new = product("hqd,hdk->hqk", queries, piece)
        return lax.dynamic_update_slice(scores, new, (head, 0, token))

    scores = jnp.zeros((*rows.shape[:2], capacity), jnp.float32)
    scores = softcap(for_each_piece(score, scores), cap)
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)).astype(q.dtype)

    def add(head, token, heads, tokens, totals):
        shape = 1, heads, tokens, size
        piece = lax.dynamic_slice(values, (layer, head, token, 0), shape)[0]
        shape = heads, rows.shape[1], tokens
        weight = lax.dynamic_slice(weights, (head, 0, token), shape)
        total = lax.dynamic_slice_in_dim(totals, head, heads)
        total = total + product("hqk,hkd->hqd", weight, piece)
        return lax.dynamic_update_slice_in_dim(totals, total, head, 0)

    totals = for_each_piece(add, jnp.zeros(rows.shape, jnp.float32))
    return totals.astype(q.dtype).reshape(q.shape)
