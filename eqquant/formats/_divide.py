"""Correctly rounded quotients, also where XLA or CUDA divide less exactly."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float


def true_divide(x: Float[Array, "*shape"], by) -> Float[Array, "*shape"]:
    """Return `x / by`, correctly rounded.

    XLA replaces a division by a constant or a broadcast array by a product with the
    reciprocal, which can be wrong in the last place. Then `x / x` is not 1, and
    quantizing a dequantized array is not the identity. The comparison is true for every
    number. XLA cannot simplify it, and divides. On CUDA, even this quotient can be
    wrong by two units in the last place, and is corrected.
    """
    by = jnp.broadcast_to(jnp.asarray(by, x.dtype), x.shape)
    quotient = _quotient(x, by)
    return lax.platform_dependent(
        quotient, x, by, cuda=correct_quotient, default=lambda quotient, *_: quotient
    )


def _quotient(x, by):
    """Return `x / by`, divided by XLA: see `true_divide`."""
    return x / jnp.where(x == x, by, 1)


def correct_quotient(
    quotient: Float[Array, "*shape"],
    x: Float[Array, "*shape"],
    by: Float[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """Return `x / by`, correctly rounded, for a quotient that is nearly that.

    The remainder is exact, because significands of 12 bits have exact products. This
    holds for normal numbers whose quotient and remainder are normal.
    """
    if x.dtype != jnp.float32:
        return quotient  # Divided exactly, or in float32 and then rounded.

    def split(x):
        high = lax.bitcast_convert_type(
            lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0xFFFFF000), jnp.float32
        )
        return high, x - high

    (high, low), (by_high, by_low) = split(quotient), split(by)
    remainder = x - high * by_high - high * by_low - low * by_high - low * by_low
    corrected = quotient + remainder / by
    return jnp.where(jnp.isfinite(corrected), corrected, quotient)


def divide_blocks(
    blocks: Float[Array, "*lead size"], by: Float[Array, "*lead"]
) -> Float[Array, "*lead size"]:
    """Divide each block by its number, or by 1 if the number is zero."""
    by = jnp.where(by != 0, by, 1).astype(blocks.dtype)[..., None]
    # CUDA's quotient can be wrong by two units in the last place. This changes the code
    # of a value halfway between two levels only, and `true_divide` would take longer.
    return lax.platform_dependent(
        blocks, by, cuda=lambda x, by: x / by, default=_quotient
    )
