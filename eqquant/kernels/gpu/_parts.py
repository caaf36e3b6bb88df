"""Operands as sums of one or two 16-bit numbers, which GPUs multiply fast."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from ...formats import Format
from .._compute import Precision


def is_exact(blocks: int, format: Format) -> bool:
    """Return whether codes are integers with one scale per row. 16 bits hold them."""
    return format.integer_levels and blocks == 1


def num_parts(
    x_dtype,
    weight_dtype,
    *,
    exact: bool,
    contract_rows: bool,
    precision: Precision,
) -> tuple[int, int]:
    """Return the bfloat16 parts of the activation and of the weight. If the weight is
    `exact` and `contract_rows`, scales multiply the activation instead."""
    narrow = all(jnp.dtype(d) == jnp.bfloat16 for d in (x_dtype, weight_dtype))
    if precision == "default" or narrow:
        return 1, 1
    holds = jnp.dtype(x_dtype) in (jnp.bfloat16, jnp.int8)
    return 1 if holds and not (exact and contract_rows) else 2, 1 if exact else 2


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
