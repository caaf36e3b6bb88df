"""Levels of codes, by a table lookup."""

import functools as ft

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer, Shaped

from ..._jax import apart
from ...formats import Format


def levels(
    codes: Integer[Array, "*shape"], format: Format, dtype
) -> Shaped[Array, "*shape"]:
    """Look up the levels of codes, or of states, in a table, which stays in the L1
    cache.

    This takes one load per code; selects take about twenty instructions. XLA fuses a
    lookup into each of its users, but writes the result of many selects to memory.
    """
    if format.bits == 8 and format.integer_levels:
        return codes.astype(dtype)
    if format.bits == 8:
        codes = lax.bitcast_convert_type(codes, jnp.uint8)
    table = jnp.asarray(table_of(format), dtype)
    return table.at[codes.astype(jnp.int32)].get(mode="promise_in_bounds")


@ft.lru_cache(maxsize=64)
def table_of(format: Format) -> np.ndarray:
    """Return the levels of all codes, or states, as a constant, which saves a kernel
    launch."""

    dtype = jnp.uint16 if format.history else format.code_dtype

    def table() -> np.ndarray:
        states = jnp.arange(2 ** (format.bits * (format.history + 1)))
        return np.asarray(format.levels(states.astype(dtype), jnp.float32))

    return apart(table)


def per_code(
    scales: Float[Array, "rows blocks"], size: int
) -> Float[Array, "rows size"]:
    """Repeat each scale for all codes of its block."""
    rows, blocks = scales.shape
    scales = jnp.broadcast_to(scales[:, :, None], (rows, blocks, size // blocks))
    return scales.reshape(rows, size)
