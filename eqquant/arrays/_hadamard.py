"""The fast Hadamard transform of an axis, block by block."""

import functools as ft
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._jax import wide_dtype


# The size of one factor of the transform, like the matrix units of most accelerators.
_largest_factor = 128


def hadamard_block(size: int) -> int:
    """Return the largest power of two that divides `size`."""
    return size & -size


def hadamard(x: Float[Array, "..."], axis: int, block: int) -> Float[Array, "..."]:
    """Multiply each block of an axis by Sylvester's orthogonal Hadamard matrix.

    The transform is its own inverse. The matrix of a large block is a Kronecker
    product of smaller matrices, which need one product each.
    """
    return _hadamard(x, axis % x.ndim, block)


def check_rotation(caller: str, rotate: bool | int) -> None:
    """Raise a `ValueError` if `rotate` is neither a bool nor a block size."""
    if type(rotate) is int and (rotate < 2 or hadamard_block(rotate) != rotate):
        raise ValueError(
            f"{caller}: rotate must be True, False or the number of values that are "
            f"rotated together, a power of two of at least 2, got {rotate}."
        )


def rotated(
    array, axis: int, largest: bool | int = True
) -> tuple[Float[Array, "..."], int]:
    """Rotate an axis with the largest possible block, or the largest one of at most
    `largest` values. Return the array and the block.

    If the size of the axis is odd, return the unchanged array and 1.
    """
    array = jnp.asarray(array)
    block = hadamard_block(array.shape[axis]) if array.ndim and array.size else 1
    block = block if largest is True else min(block, largest)
    if block == 1:
        return array, 1
    # A shorter dtype would round rotated values a second time.
    wide = array.astype(wide_dtype(array.dtype))
    return hadamard(wide, axis, block), block


@ft.partial(jax.jit, static_argnames=("axis", "block"), inline=True)
def _hadamard(x: Float[Array, "..."], axis: int, block: int) -> Float[Array, "..."]:
    dtype, size = x.dtype, x.shape[axis]
    x = jnp.moveaxis(x, axis, -1).astype(wide_dtype(dtype))
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
