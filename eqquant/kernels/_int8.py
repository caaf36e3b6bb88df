"""Rounding of activations to int8.

All divisions are products with reciprocals. XLA may replace a division by such a
product or not, depending on the program. A tie would then round up or down.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8


def scale_of_rows(
    x: Float[Array, "*m size"], over: tuple[str, ...] = ()
) -> Float[Array, "*m 1"]:
    """Return the scale of each row for int8: `absmax / 127`."""
    absmax = _absmax(x, over)
    # Below this limit, `absmax / 127` is subnormal, and flushed to zero.
    is_zero = absmax < 127 * jnp.finfo(jnp.float32).tiny
    return jnp.where(is_zero, 1, absmax * jnp.float32(1 / 127))


def lift_tiny_rows(
    x: Float[Array, "m size"],
) -> tuple[Float[Array, "m size"], Float[Array, "m 1"]]:
    """Multiply the rows that [`scale_of_rows`][] takes for zeros, and slightly larger
    rows, by a power of two. Return also the factors that undo this."""
    down = jnp.where(_absmax(x, ()) < 2**-115, jnp.float32(2**-24), 1)
    return x * (1 / down), down


def _absmax(x: Float[Array, "*m size"], over: tuple[str, ...]) -> Float[Array, "*m 1"]:
    # Compare bits, because the float maximum of XLA:CPU may drop a NaN. The scale of a
    # row with a NaN must be NaN.
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(0x7FFFFFFF)
    largest = jnp.max(bits, -1, keepdims=True)
    largest = lax.pmax(largest, over) if over else largest
    absmax = lax.bitcast_convert_type(largest, jnp.float32)
    return jnp.where(jnp.isfinite(absmax), absmax, jnp.nan)


def split_int8(
    x: Float[Array, "m size"],
) -> tuple[Int8[Array, "twice_m size"], Float[Array, "m 1"]]:
    """Split `x` into two stacked int8 matrices: `(high + low / 254) * scale`."""
    scale = scale_of_rows(x)
    x = x * (1 / scale)
    high = jnp.round(x)
    low = jnp.round((x - high) * 254)
    return jnp.concatenate([high, low]).astype(jnp.int8), scale


def round_int8(
    x: Float[Array, "*m size"], over: tuple[str, ...] = ()
) -> tuple[Int8[Array, "*m size"], Float[Array, "*m 1"]]:
    """Round `x` to an int8 matrix times one scale per row. `over` are the mesh axes
    that split the rows, inside of `shard_map`."""
    x = x.astype(jnp.float32)
    scale = scale_of_rows(x, over)
    return jnp.round(x * (1 / scale)).astype(jnp.int8), scale


def rounding(x, bits: int | None) -> str:
    """Describe the rounding of an activation by a kernel that keeps `bits` bits, or all
    bits if `bits` is None. An int8 activation has been rounded before."""
    bits = 8 if x.dtype == jnp.int8 else bits
    if bits is None:
        return "(activations not rounded)"
    return f"(activations rounded to {bits} bits)"
