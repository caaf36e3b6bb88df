"""Operands as sums of one or two 16-bit numbers, which GPUs multiply fast."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from .._product import Product


def num_parts(product: Product) -> tuple[int, int]:
    """Return the bfloat16 parts of the activation and of the weight. 16 bits hold
    integers with one scale per row. For `x @ w`, these scales multiply the activation
    instead."""
    if product.precision == "default" or product.is_all("bfloat16"):
        return 1, 1
    exact = product.has_integer_rows
    holds = product.x.dtype == jnp.bfloat16 or product.is_int8
    holds = holds and not (exact and product.contract_rows)
    return 1 if holds else 2, 1 if exact else 2


def split(x: Shaped[Array, "m size"], dtype, parts: int) -> list[Array]:
    """Split `x` into `parts` arrays of `dtype` whose sum is close to `x`, the largest
    first."""
    high = x.astype(dtype)
    if parts == 1:
        return [high]
    # Round explicitly: XLA may remove a cast that is cast back.
    wide = x.astype(jnp.float32)
    kept = lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
    rest = jnp.where(jnp.isfinite(kept), wide - kept, 0)
    return [kept.astype(dtype), rest.astype(dtype)]


def multiply(
    xs: list[Shaped[Array, "m size"]],
    ws: list[Shaped[Array, "rows columns"]],
    contract_rows: bool,
    dtype,
) -> Shaped[Array, "m out"]:
    """Multiply two sums, without the product of the two smallest parts. The parts of
    the activation are concatenated, so that the weight is read once."""
    m = xs[0].shape[0]
    total = None
    for i, w in enumerate(ws):
        rows = xs if i == 0 else xs[:1]
        x = jnp.concatenate(rows) if len(rows) > 1 else rows[0]
        product = lax.dot_general(
            x,
            w,
            (((1,), (0 if contract_rows else 1,)), ((), ())),
            precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=dtype,
        )
        if len(rows) > 1:
            product = product[:m] + product[m:]
        total = product if total is None else total + product
    assert total is not None
    return total
