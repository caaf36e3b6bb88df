"""Products of few rows: one kernel that reads nothing of the size of the weight but
codes.

XLA compiles a sum along rows and all of its inputs to one kernel without a loop. It
loads a byte of codes once for all of its planes and all rows of the activation.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from ...formats import planes_of, to_plane_order
from .._product import Product
from ._levels import levels, per_code


def dot(
    product: Product,
    operand: str,
    x: Shaped[Array, "m columns"],
    codes: Shaped[Array, "rows packed"],
    scales: Float[Array, "rows blocks"],
) -> Float[Array, "m rows"]:
    """Compute a product `x @ w.T`, in float32."""
    format, m, packed = product.format, product.m, product.packed
    planes, blocked = planes_of(format.bits), product.blocks > 1
    scales = scales.astype(jnp.float32)
    x = to_plane_order(x.astype(jnp.float32), format.bits, format.group)
    x = x.reshape(m, planes, packed)
    w = []
    for plane in range(planes):
        index = codes
        if planes > 1:
            index = codes >> jnp.uint8(plane * format.bits)
            index = index & jnp.uint8(2**format.bits - 1)
        w.append(levels(index, format, jnp.float32))
    if blocked:
        code_scales = per_code(scales, packed)
        w = [level * code_scales for level in w]
    terms = []
    for row in x:
        term = row[0] * w[0]
        for plane in range(1, planes):
            term = term + row[plane] * w[plane]
        terms.append(term)

    def add(sums, more):
        return tuple(a + b for a, b in zip(sums, more, strict=True))

    zeros = (jnp.float32(0),) * m
    out = jnp.stack(lax.reduce(tuple(terms), zeros, add, (1,)))
    return (out if blocked else out * scales[:, 0]).astype(product.out_dtype)
