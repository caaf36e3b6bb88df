"""Dropout without a key at call time."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Key, UInt32


def drop_rows(
    x: Float[Array, "..."],
    over: Sequence[int],
    keys: tuple[Key[Array, "..."], Sequence[int]],
    rate: float,
) -> Float[Array, "..."]:
    """`x` with a part `rate` of its elements zero, and the others larger for it.

    The elements along the axes `over` are a row, and each row has a mask of its own:
    the key is folded with a hash of the row. So a row meets the same mask wherever it
    is in a batch, whether that is mapped over or multiplied at once, and when it is
    computed again in a backward pass; other rows, and other keys, others.

    `keys` are the keys, and the axes of `x` along which they are.
    """
    key, key_axes = keys
    rest = [axis for axis in range(x.ndim) if axis not in over and axis not in key_axes]
    order = [*key_axes, *rest, *over]
    shape = [x.shape[axis] for axis in order]
    count = x.ndim - len(over)
    size = math.prod(shape[count:])
    rows = jnp.transpose(x, order).reshape(-1, size)
    key = jnp.broadcast_to(
        key.reshape(*key.shape, *(1 for _ in rest)), shape[:count]
    ).reshape(-1)
    kept = jax.vmap(lambda key, row: _mask(key, row, rate))(key, rows)
    kept = kept.reshape(shape)
    kept = jnp.transpose(kept, [order.index(axis) for axis in range(x.ndim)])
    return jnp.where(kept, x / (1 - rate), 0)


def _mask(
    key: Key[Array, ""], row: Float[Array, " size"], rate: float
) -> Bool[Array, " size"]:
    return jax.random.bernoulli(
        jax.random.fold_in(key, _hash(row)), 1 - rate, row.shape
    )


def _hash(row: Float[Array, " size"]) -> UInt32[Array, ""]:
    bits = lax.bitcast_convert_type(row.astype(jnp.float32), jnp.uint32)
    # An odd number for each place: to change one element, or swap two, changes the sum.
    places = jnp.arange(row.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B1) | 1
    return jnp.sum(bits * places, dtype=jnp.uint32)
