"""Transpose matrices of bytes on CPUs, by a native kernel.

XLA:CPU fuses a transposition with the arithmetic that computes its operand. The result
reads single bytes, and takes ten times as long.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int8


def transposed(x: Int8[Array, "*stack m n"]) -> Int8[Array, "*stack n m"]:
    """Swap the last two axes. The native library must be available."""
    *stack, m, n = x.shape
    flat = jax.ShapeDtypeStruct((math.prod(stack), n, m), jnp.int8)
    out = jax.ffi.ffi_call("eqquant_transpose", flat)(x.reshape(-1, m, n))
    return out.reshape(*stack, n, m)
