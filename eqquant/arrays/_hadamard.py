"""The fast Hadamard transform of an axis, block by block."""

import functools as ft
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


# One factor of the transform: as large as the matrix units of most accelerators.
_largest_factor = 128


def hadamard_block(size: int) -> int:
    """The largest power of two that divides `size`."""
    return size & -size


def hadamard(x: Float[Array, "..."], axis: int, block: int) -> Float[Array, "..."]:
    """Each block of an axis, times the orthogonal Hadamard matrix (Sylvester's). Doing
    so twice changes nothing.

    The matrix of a large block is the Kronecker product of smaller ones: for each of
    them one product.
    """
    return _hadamard(x, axis % x.ndim, block)


def rotated(array, axis: int) -> tuple[Float[Array, "..."], int]:
    """An array with the largest blocks of an axis rotated, and their size: the array
    itself, and 1, if the size of the axis is odd."""
    array = jnp.asarray(array)
    block = hadamard_block(array.shape[axis]) if array.ndim and array.size else 1
    if block == 1:
        return array, 1
    # Rotated values of a shorter dtype would be rounded twice.
    wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    return hadamard(wide, axis, block), block


@ft.partial(jax.jit, static_argnames=("axis", "block"), inline=True)
def _hadamard(x: Float[Array, "..."], axis: int, block: int) -> Float[Array, "..."]:
    dtype, size = x.dtype, x.shape[axis]
    x = jnp.moveaxis(x, axis, -1).astype(jnp.promote_types(dtype, jnp.float32))
    lead = x.shape[:-1]
    factors = []
    rest = block
    while rest > 1:
        factors.append(min(rest, _largest_factor))
        rest //= factors[-1]
    x = x.reshape(*lead, size // block, *reversed(factors))
    for i, factor in enumerate(factors):
        at = x.ndim - 1 - i
        matrix = jnp.asarray(_matrix(factor), x.dtype)
        x = jnp.tensordot(x, matrix, ((at,), (0,)), precision="highest")
        x = jnp.moveaxis(x, -1, at)
    return jnp.moveaxis(x.reshape(*lead, size), -1, axis).astype(dtype)


def _matrix(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(size)
