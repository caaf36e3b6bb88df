"""The nearest of a table of levels, exactly."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8


def midpoints(levels: Sequence[float], dtype: np.dtype) -> list[np.floating]:
    """Between each two levels the largest float that does not exceed the exact
    midpoint, so that `x > midpoint` is the exact comparison for every float x, and a
    tie goes to the lower level."""

    def between(low: float, high: float) -> np.floating:
        exact = (Fraction(low) + Fraction(high)) / 2
        rounded = dtype.type(float(exact))
        if Fraction(float(rounded)) > exact:
            rounded = np.nextafter(rounded, dtype.type(-np.inf))
        return rounded

    return [between(low, high) for low, high in pairwise(levels)]


def count_below(
    x: Float[Array, "*shape"], boundaries: Sequence[Any]
) -> UInt8[Array, "*shape"]:
    """How many of the boundaries, which ascend, lie below each value: a binary search
    by selects."""
    depth = max(1, len(boundaries).bit_length())
    whole = 2**depth - 1
    table = [*boundaries, *[np.asarray(np.inf, x.dtype)] * (whole - len(boundaries))]

    def search(low: int, high: int, bits: list) -> Any:
        """The boundary to compare with next, given the bits known so far."""
        middle = (low + high) // 2
        if not bits:
            return table[middle]
        return jnp.where(
            bits[0], search(middle, high, bits[1:]), search(low, middle, bits[1:])
        )

    bits = []
    for _ in range(depth):
        bits.append(x > search(-1, whole, bits))
    code = bits[0].astype(jnp.uint8)
    for bit in bits[1:]:
        code = (code << jnp.uint8(1)) | bit.astype(jnp.uint8)
    return code
