"""Quantizing on CPUs: a native kernel."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt8

from ...formats import Format
from ._library import load


def encodes(array: Float[Array, "..."], format: Format) -> bool:
    """Whether [`encode`][] serves: in float32, for whole blocks."""
    library = load()
    return (
        not isinstance(library, str)
        and "avx512" in library.instructions
        and format.boundaries is not None
        and len(format.boundaries) == 15
        and format.block_size is not None
        and format.block_size % 32 == 0
        and array.size > 0
        and array.shape[-1] % format.block_size == 0
        and array.dtype == format.scale_dtype == np.float32
    )


def encode(
    array: Float[Array, "*lead size"], *, format: Format
) -> tuple[
    UInt8[Array, "*lead packed"], Float[Array, "*lead blocks"], Bool[Array, "*lead"]
]:
    """Codes, scales, and whether something in a row is not finite: bit for bit what
    `format.encode` gives."""
    *lead, size = array.shape
    block, boundaries = format.block_size, format.boundaries
    assert block is not None and boundaries is not None
    rows, blocks = math.prod(lead), size // block
    codes, scales, problems = jax.ffi.ffi_call(
        "eqquant_encode",
        (
            jax.ShapeDtypeStruct((rows, size // 2), jnp.uint8),
            jax.ShapeDtypeStruct((rows, blocks), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.bool_),
        ),
    )(
        array.reshape(rows, size),
        jnp.asarray([*boundaries, jnp.inf], jnp.float32),
        block=np.int64(block),
    )
    codes, scales = codes.reshape(*lead, -1), scales.reshape(*lead, -1)
    return codes, scales, problems.reshape(lead)
