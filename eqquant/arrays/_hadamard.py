"""Rotations of weights by Hadamard matrices."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._jax import wide_dtype
from ..primitives import hadamard


def hadamard_block(size: int) -> int:
    """Return the largest power of two that divides `size`."""
    return size & -size


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
