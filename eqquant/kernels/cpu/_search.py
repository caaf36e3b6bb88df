"""Search for the codes of rows with error feedback, by a native kernel."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from ._library import load


def searches(bits: int) -> bool:
    """Return whether this machine has a kernel for codes of `bits` bits."""
    library = load()
    is_there = not isinstance(library, str) and "avx512" in library.instructions
    return is_there and bits <= 4


def search(
    rows: Float[Array, "rows width"],
    scales: Float[Array, " rows"],
    factor: Float[Array, "width width"],
    levels: Float[Array, " states"],
    *,
    bits: int,
    count: int,
) -> tuple[
    Float[Array, "rows width"], Float[Array, "rows width"], UInt8[Array, "rows width"]
]:
    """Return the chosen values of each row, their errors divided by the diagonal of
    `factor`, and their codes. The search keeps `count` roundings of a row. `levels` has
    the level of each state."""
    like = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
    codes = jax.ShapeDtypeStruct(rows.shape, jnp.uint8)
    values, errors, codes = jax.ffi.ffi_call("eqquant_search", (like, like, codes))(
        rows, scales, factor, levels, bits=np.int64(bits), count=np.int64(count)
    )
    return values, errors, codes
