"""Rotate rows on CPUs, by a native kernel.

XLA:CPU multiplies by the matrix. For a row, this takes several operations, which
together take as long as a small quantized product.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._library import load


def rotates(x: Any) -> bool:
    """Return whether [`rotate`][] supports an array of this shape and dtype."""
    return x.dtype == jnp.float32 and x.size > 0 and not isinstance(load(), str)


def rotate(x: Float[Array, "*lead size"], block: int) -> Float[Array, "*lead size"]:
    """Multiply each block of the last axis by Sylvester's orthogonal Hadamard
    matrix."""
    *lead, size = x.shape
    flat = jax.ShapeDtypeStruct((math.prod(lead), size), jnp.float32)
    call = jax.ffi.ffi_call("eqquant_rotate", flat)
    return call(x.reshape(flat.shape), block=np.int64(block)).reshape(x.shape)
