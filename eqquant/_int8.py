"""Activations in int8."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8


def _row_unit(x: Float[Array, "m size"]) -> Float[Array, "m 1"]:
    # Through the bits: XLA:CPU's maximum of floats may lose a NaN, and a row with a NaN
    # has to stay one.
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(0x7FFFFFFF)
    absmax = lax.bitcast_convert_type(jnp.max(bits, -1, keepdims=True), jnp.float32)
    absmax = jnp.where(jnp.isfinite(absmax), absmax, jnp.nan)
    return jnp.where(absmax == 0, 1, absmax / 127)


def split_int8(
    x: Float[Array, "m size"],
) -> tuple[Int8[Array, "twice_m size"], Float[Array, "twice_m 1"]]:
    """`x` as two int8 matrices, one above the other: `high * unit + low * unit/254`."""
    unit = _row_unit(x)
    x = x / unit
    high = jnp.round(x)
    low = jnp.round((x - high) * 254)
    rows = jnp.concatenate([high, low]).astype(jnp.int8)
    return rows, jnp.concatenate([unit, unit / 254])


def round_int8(
    x: Float[Array, "m size"],
) -> tuple[Int8[Array, "m size"], Float[Array, "m 1"]]:
    """`x` as an int8 matrix times one number for each row."""
    unit = _row_unit(x)
    return jnp.round(x / unit).astype(jnp.int8), unit
