"""Exact search for the nearest level in a table."""

import dataclasses
import functools as ft
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8


def midpoints(levels: Sequence[float], dtype: np.dtype) -> list[np.floating]:
    """Return the midpoints of neighbouring levels, rounded down to floats.

    So `x > midpoint` is the exact comparison for every float x, and ties go to the
    lower level.
    """

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
    """Count the ascending boundaries below each value. The count is 0 for a NaN."""
    search = ft.partial(_search, boundaries=boundaries)
    cells = None
    if x.dtype == jnp.float32:
        cells = _cells(tuple(float(boundary) for boundary in boundaries))
    if cells is None:
        return search(x)
    # A GPU loads from a small table in parallel to arithmetic, unlike selects.
    return lax.platform_dependent(
        x, cuda=ft.partial(_look_up, cells=cells), default=search
    )


def _search(
    x: Float[Array, "*shape"], boundaries: Sequence[Any]
) -> UInt8[Array, "*shape"]:
    """Search with a binary tree of selects."""
    depth = max(1, len(boundaries).bit_length())
    whole = 2**depth - 1
    table = [*boundaries, *[np.asarray(np.inf, x.dtype)] * (whole - len(boundaries))]

    def search(low: int, high: int, bits: list) -> Any:
        """Return the next boundary to compare with, given the first bits."""
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


@dataclasses.dataclass(frozen=True, eq=False)
class _Cells:
    """Cells of equal width between the lowest and the highest boundary.

    No cell has two boundaries, and the cell of a float is monotonic in the float. So
    one comparison with the boundary of its cell is enough.

    **Fields:**

    - `low`, `high`: the range to which values are clipped.
    - `scale`, `offset`: `x * scale + offset` is from 8 to 12, and its bits contain the
        cell.
    - `ends`: the boundary of each cell, or infinity.
    - `below`: the number of boundaries in the cells before.
    """

    low: np.floating
    high: np.floating
    scale: np.floating
    offset: np.floating
    ends: np.ndarray
    below: np.ndarray


# 32 cells are for 8 to 12, and fill a cache line of a GPU. The others are for NaNs of
# any bits.
_num_cells = 64
_shift = 23 - 6  # The highest bits of a mantissa.


@ft.lru_cache(maxsize=64)
def _cells(boundaries: tuple[float, ...]) -> _Cells | None:
    """Return the cells, or None if two boundaries are too close."""
    ends = np.array(boundaries, np.float32)
    high = np.nextafter(ends[-1], np.float32(np.inf))
    for exponent in range(-120, 64):  # A power of two rounds nothing.
        scale = np.float32(2.0**exponent)
        offset = np.nextafter(np.float32(8) - ends[0] * scale, np.float32(np.inf))
        if not high * scale + offset < 12:
            return None
        cells = (ends * scale + offset).view(np.int32) >> _shift & (_num_cells - 1)
        if len(set(cells.tolist())) == len(cells):
            table = np.full(_num_cells, np.inf, np.float32)
            table[cells] = ends
            below = np.searchsorted(cells, np.arange(_num_cells)).astype(np.uint8)
            below[_num_cells // 2 :] = 0
            return _Cells(ends[0], high, scale, offset, table, below)
    return None


def _look_up(x: Float[Array, "*shape"], cells: _Cells) -> UInt8[Array, "*shape"]:
    """Search by loads from two tables."""
    place = jnp.clip(x, cells.low, cells.high) * cells.scale + cells.offset
    # Unsigned, because JAX would handle negative indices otherwise.
    cell = lax.bitcast_convert_type(place, jnp.uint32) >> jnp.uint32(_shift)
    cell = cell & jnp.uint32(_num_cells - 1)
    of = lambda table: jnp.asarray(table).at[cell].get(mode="promise_in_bounds")
    return of(cells.below) + (x > of(cells.ends)).astype(jnp.uint8)
