"""Slots for tokens: a ring buffer, and its values in place of a range of tokens.

The token at position `p` has slot `p % count`, if the slot has the position `p`. Any
other slot holds another token, and the token at `p` has no slot.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped


def write_slots(
    old: Any, new: Any, lead: tuple[Any, ...], start: Int[Array, ""]
) -> Any:
    """Write tokens `start`, `start + 1`, ... into their slots.

    `old` is an array `(*lead, slots, *rest)`, and `new` has `(*lead, tokens, *rest)`.
    `lead` has a start for each leading axis. Only the last tokens are kept if there are
    more tokens than slots.
    """
    axis = len(lead)
    count, tokens = old.shape[axis], new.shape[axis]
    rest = (0,) * (old.ndim - axis - 1)
    if tokens > count:
        new = lax.slice_in_dim(new, tokens - count, None, axis=axis)
        start, tokens = start + tokens - count, count
    if tokens == 1:
        return _update(old, new, (*lead, start % count, *rest))
    sizes = (*new.shape[:axis], *old.shape[axis:])
    now = lax.dynamic_slice(
        old, _starts((*lead, 0, *rest)), sizes, allow_negative_indices=False
    )
    source = (jnp.arange(count) - start) % count
    written = (source < tokens).reshape(-1, *(1,) * len(rest))
    new = jnp.take(new, jnp.minimum(source, tokens - 1), axis)
    return _update(old, jnp.where(written, new, now), (*lead, 0, *rest))


def read_slots(
    x: Shaped[Array, "..."],
    lead: tuple[Any, ...],
    sizes: tuple[int, ...],
    tokens: Int[Array, " tokens"],
) -> Shaped[Array, "..."]:
    """Slice the leading axes, and return the slots of tokens, whichever tokens they
    hold."""
    axis = len(lead)
    start = _starts((*lead, *(0,) * (x.ndim - axis)))
    sizes = (*sizes, *x.shape[axis:])
    part = lax.dynamic_slice(x, start, sizes, allow_negative_indices=False)
    return jnp.take(part, tokens % x.shape[axis], axis)


def update_blocks(
    old: Any, new: Any, lead: tuple[Any, ...], block: Any, count: int
) -> Any:
    """Replace blocks of the last axis, which has `count` blocks, from block `block`."""
    step = old.shape[-1] // count
    return _update(old, new, (*lead, block * step))


def blocks_of(
    part: Any, sizes: tuple[int, ...], lead: tuple[Any, ...], block: Any, count: int
) -> Any:
    """Slice the leading axes, and the last axis from block `block` on. `sizes` has the
    leading sizes, and the number of blocks."""
    step = part.shape[-1] // count
    start = _starts((*lead, block * step))
    sizes = (*sizes[:-1], sizes[-1] * step)
    return lax.dynamic_slice(part, start, sizes, allow_negative_indices=False)


def _update(old, new, start):
    return lax.dynamic_update_slice(
        old, new.astype(old.dtype), _starts(start), allow_negative_indices=False
    )


def _starts(start) -> list[Array]:
    dtype = jnp.result_type(*start)
    return [jnp.asarray(i, dtype) for i in start]


def in_slots(
    positions: Int[Array, "*lead slots"], tokens: int
) -> Bool[Array, "*lead rounds slots"]:
    """Return whether the token `round * slots + slot` has its slot."""
    count = positions.shape[-1]
    rounds = -(-tokens // count)
    first = count * jnp.arange(rounds)[:, None] + jnp.arange(count)
    return positions[..., None, :] == first


def from_slots(
    far: Float[Array, "... tokens"],
    near: Float[Array, "... slots"],
    has_slot: Bool[Array, "... rounds slots"],
) -> Float[Array, "... tokens"]:
    """Return `near` for tokens in slots, and `far` for all others."""
    return _in_rounds(
        far, has_slot, lambda far: jnp.where(has_slot, near[..., None, :], far)
    )


def to_slots(
    x: Float[Array, "... tokens"], has_slot: Bool[Array, "... rounds slots"]
) -> tuple[Float[Array, "... tokens"], Float[Array, "... slots"]]:
    """Split `x` into the values of tokens without slots, zero elsewhere, and the values
    in slots."""
    far = _in_rounds(x, has_slot, lambda x: jnp.where(has_slot, 0, x))
    padded = _rounds(x, has_slot.shape[-1])
    return far, jnp.sum(jnp.where(has_slot, padded, 0), -2)


def last_written(
    numbers: Int[Array, "... tokens"], slots: int
) -> tuple[Int[Array, "... slots"], Int[Array, "... slots"]]:
    """Return the number of the last written token of each slot, and its position.
    `numbers` are -1 for tokens that are not written, and so are the results for slots
    without a written token."""
    rounds = _rounds(numbers + 1, slots) - 1
    place = jnp.arange(rounds.shape[-2], dtype=jnp.int32)[:, None]
    last = jnp.max(jnp.where(rounds < 0, -1, place), -2, keepdims=True)
    found = jnp.take_along_axis(rounds, jnp.maximum(last, 0), -2)[..., 0, :]
    position = last[..., 0, :] * slots + jnp.arange(slots, dtype=jnp.int32)
    return found, jnp.where(found < 0, -1, position)


def _rounds(x: Shaped[Array, "... tokens"], slots: int) -> Shaped[Array, "..."]:
    """Reshape to `(..., rounds, slots)`, after padding with zeros."""
    *lead, tokens = x.shape
    if filled := -tokens % slots:
        x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, filled)])
    return x.reshape(*lead, -1, slots)


def _in_rounds(x, has_slot, fn: Callable) -> Any:
    out = fn(_rounds(x, has_slot.shape[-1]))
    return out.reshape(*out.shape[:-2], -1)[..., : x.shape[-1]]


def last_tokens(x: Any, count: int) -> tuple[Any, Int[Array, " slots"]]:
    """Return slots `(*lead, count, *rest)` with the last tokens of `(*lead, tokens,
    size)`, and their positions."""
    tokens = x.shape[-2]
    slot = jnp.arange(count)
    position = (tokens - 1 - (tokens - 1 - slot) % count).astype(jnp.int32)
    exists = position >= 0
    values = jnp.take(x, jnp.maximum(position, 0), -2)
    return jnp.where(exists[:, None], values, 0), jnp.where(exists, position, tokens)
