"""Products with int8 codes: XLA fuses the conversion of the codes into the matmul."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Shaped

from .._product import Product
from ._parts import multiply, num_parts, split


def dot(
    product: Product,
    operand: str,
    x: Shaped[Array, "m size"],
    codes: Int8[Array, "rows columns"],
    scales: Float[Array, "rows 1"],
) -> Float[Array, "m out"]:
    """Compute a product, by operands of dtype `operand`."""
    contract_rows = product.contract_rows
    row_scales = scales[:, 0].astype(jnp.float32)
    if operand == "int8":
        out = multiply([x], [codes], contract_rows, jnp.int32).astype(jnp.float32)
        return (out * row_scales).astype(product.out_dtype)
    dtype = jnp.dtype(operand)
    if contract_rows:
        x = x.astype(jnp.float32) * row_scales
    parts, _ = num_parts(product) if dtype == jnp.bfloat16 else (1, 1)
    xs = split(x, dtype, parts)
    out = multiply(xs, [codes.astype(dtype)], contract_rows, jnp.float32)
    return (out if contract_rows else out * row_scales).astype(product.out_dtype)
