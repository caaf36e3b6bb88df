"""Functions that return their first argument, and whose derivatives record
statistics."""

import functools as ft
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ...primitives import sums_of_rows


def _pass(out, *_):
    return out


def _forward_product(out, gram, rows, power, peak, x):
    return out, (x, jnp.zeros((), gram.dtype))


def _backward_product(every_row: bool, residuals, ct):
    x, like = residuals
    # Depends on `x`, because `jax.vmap` sums the cotangents of mapped values only.
    live = (x[..., 0] == x[..., 0]) | True if every_row else jnp.any(ct != 0, -1)
    rows = jnp.where(live[..., None], x, 0).astype(like.dtype)
    power = jnp.sum(jnp.square(ct.astype(like.dtype)), -1)
    peak = jnp.max(jnp.abs(rows), -1)
    return ct, rows, live.astype(like.dtype), power, peak, jnp.zeros_like(x)


def _tie(every_row: bool) -> Callable:
    """Return `out`.

    Each row of `out` with a nonzero cotangent determines these cotangents: `x` for
    `gram`, 1 for `rows`, the squared norm of the cotangent for `power`, and the largest
    magnitude of `x` for `peak`.
    """
    tie = jax.custom_vjp(_pass)
    tie.defvjp(_forward_product, ft.partial(_backward_product, every_row))
    return tie


tie_product = {every_row: _tie(every_row) for every_row in (False, True)}


@jax.custom_vjp
def tie_lookup(rows, gram, count, power):
    """Like `observe_rows`, for a lookup."""
    return rows


def _forward_lookup(rows, gram, count, power):
    return rows, jnp.zeros((), gram.dtype)


def _backward_lookup(like, ct):
    return ct, *sums_of_rows(ct, ct.ndim - 2, like.dtype)


tie_lookup.defvjp(_forward_lookup, _backward_lookup)
