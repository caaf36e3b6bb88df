"""Operands as one or two numbers of 16 bits, which is what GPUs multiply fast."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from ...formats import Format
from .._compute import Precision


def is_exact(blocks: int, format: Format) -> bool:
    """Whether codes are integers that 16 bits hold, to be scaled row by row."""
    return format.integer_levels and blocks == 1


def num_parts(
    x_dtype,
    weight_dtype,
    *,
    exact: bool,
    contract_rows: bool,
    precision: Precision,
) -> tuple[int, int]:
    """How many numbers of bfloat16 stand for one of the activation, and of the weight.
    With `exact` weights an activation that contracts rows is scaled in their place."""
    narrow = all(jnp.dtype(d) == jnp.bfloat16 for d in (x_dtype, weight_dtype))
    if precision == "default" or narrow:
        return 1, 1
    holds = jnp.dtype(x_dtype) in (jnp.bfloat16, jnp.int8)
    return 1 if holds and not (exact and contract_rows) else 2, 1 if exact else 2


def split(x: Shaped[Array, "m size"], dtype, parts: int) -> list[Array]:
    """Numbers of `dtype` whose sum is nearly `x`, the largest first."""
    high = x.astype(dtype)
    if parts == 1:
        return [high]
    # The bits, as XLA may leave out a rounding that is taken back.
    wide = x.astype(jnp.float32)
    kept = lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
    rest = jnp.where(jnp.isfinite(kept), wide - kept, 0)
    return [kept.astype(dtype), rest.astype(dtype)]


def multiply(
    xs: list[Shaped[Array, "m size"]],
    ws: list[Shaped[Array, "some columns"]],
    contract_rows: bool,
    dtype,
) -> Shaped[Array, "m out"]:
    """The product of two sums, but for that of what is smallest in both. Parts of the
    activation are rows of one product, as a weight is read once for all of them."""
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
