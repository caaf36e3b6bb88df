"""Activations in int8, and what is said of activations that are rounded.

By products with reciprocals, as XLA may turn a division into one, or not: a tie would
then be rounded up or down, depending on what else is compiled.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8


def row_unit(
    x: Float[Array, "*m size"], over: tuple[str, ...] = ()
) -> Float[Array, "*m 1"]:
    """What one is worth in a row of int8."""
    # Through the bits: XLA:CPU's maximum of floats may lose a NaN, and a row with a NaN
    # has to stay one.
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(0x7FFFFFFF)
    largest = jnp.max(bits, -1, keepdims=True)
    largest = lax.pmax(largest, over) if over else largest
    absmax = lax.bitcast_convert_type(largest, jnp.float32)
    absmax = jnp.where(jnp.isfinite(absmax), absmax, jnp.nan)
    # Below that, 127ths are subnormal, and so zero.
    is_zero = absmax < 127 * jnp.finfo(jnp.float32).tiny
    return jnp.where(is_zero, 1, absmax * jnp.float32(1 / 127))


def split_int8(
    x: Float[Array, "m size"],
) -> tuple[Int8[Array, "twice_m size"], Float[Array, "twice_m 1"]]:
    """`x` as two int8 matrices, one above the other: `high * unit + low * unit/254`."""
    unit = row_unit(x)
    x = x * (1 / unit)
    high = jnp.round(x)
    low = jnp.round((x - high) * 254)
    rows = jnp.concatenate([high, low]).astype(jnp.int8)
    return rows, jnp.concatenate([unit, unit / 254])


def round_int8(
    x: Float[Array, "*m size"], over: tuple[str, ...] = ()
) -> tuple[Int8[Array, "*m size"], Float[Array, "*m 1"]]:
    """`x` as an int8 matrix times one number for each row; `over` are the mesh axes
    over which rows are split, inside of `shard_map`."""
    x = x.astype(jnp.float32)
    unit = row_unit(x, over)
    return jnp.round(x * (1 / unit)).astype(jnp.int8), unit


def rounding(x, bits: int | None) -> str:
    """What becomes of an activation, in words: which `bits` of it a kernel keeps; None
    for all. If it is in int8, that is because it has been rounded before."""
    bits = 8 if x.dtype == jnp.int8 else bits
    if bits is None:
        return "(activations not rounded)"
    return f"(activations rounded to {bits} bits)"
