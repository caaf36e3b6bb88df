"""Products with int8 codes: XLA fuses the conversion of the codes into the matmul."""

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
    row_scales = scales[:, 0].astype(jnp.float32)
    if operand == "int8":
        out = multiply([x], [codes], contract_rows, jnp.int32).astype(jnp.float32)
        return (out * row_scales).astype(out_dtype)
    dtype = jnp.dtype(operand)
    if contract_rows:
        x = x.astype(jnp.float32) * row_scales
    xs = split(x, dtype, parts[0] if dtype == jnp.bfloat16 else 1)
    out = multiply(xs, [codes.astype(dtype)], contract_rows, jnp.float32)
    return (out if contract_rows else out * row_scales).astype(out_dtype)
