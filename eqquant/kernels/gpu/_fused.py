"""Codes that are integers of 8 bits: XLA converts them inside of the product, if
nothing else is done to them."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Shaped

from ...formats import Format
from ._parts import multiply, split


def dot(
    x: Shaped[Array, "m size"],
    codes: Int8[Array, "rows columns"],
    scales: Float[Array, "rows 1"],
    *,
    format: Format,
    contract_rows: bool,
    operand: str,
    parts: tuple[int, int],
    out_dtype,
) -> Float[Array, "m out"]:
    del format
    unit = scales[:, 0].astype(jnp.float32)
    if operand == "int8":
        out = multiply([x], [codes], contract_rows, jnp.int32).astype(jnp.float32)
        return (out * unit).astype(out_dtype)
    dtype = jnp.dtype(operand)
    if contract_rows:
        x = x.astype(jnp.float32) * unit
    of_x = parts[0] if dtype == jnp.bfloat16 else 1
    xs = split(x, dtype, of_x)
    out = multiply(xs, [codes.astype(dtype)], contract_rows, jnp.float32)
    return (out if contract_rows else out * unit).astype(out_dtype)
