"""Decode in JAX as `_fragments.py` does: interpret mode does not support PTX."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from ...formats import Format, planes_of
from ._fragment_ptx import columns_of
from ._lookup import Decoder


def decode(
    codes: Shaped[Array, "128 bytes"],
    scales: Float[Array, "128 blocks"] | None,
    thread,
    decoder: Decoder,
    format: Format,
) -> tuple[Float[Array, "64 64"], Float[Array, "rows 64"]]:
    """Return the levels of a step in the rows of a warpgroup, and the scale of each."""
    q = lax.dynamic_slice_in_dim(codes, thread * 64, 64)
    planes = jnp.stack(
        [decoder([q], plane)[0] for plane in range(planes_of(format.bits))], 1
    )
    w = jnp.zeros((64, 8, 8), decoder.dtype)
    for i, columns in enumerate(columns_of(format)):
        for plane, column in enumerate(columns):
            w = w.at[:, column].set(planes[:, plane, 8 * i : 8 * i + 8])
    w = w.reshape(64, 64)
    if scales is None:
        return w, w[:1]
    scales = lax.dynamic_slice_in_dim(scales, thread * 64, 64)
    return w, jnp.repeat(scales.astype(decoder.dtype), 64 // scales.shape[1], 1)
