"""The nearest of a table of levels, exactly."""

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
    """How many of the boundaries, which ascend, lie below each value: of a NaN none."""
    search = ft.partial(_search, boundaries=boundaries)
    cells = None
    if x.dtype == jnp.float32:
        cells = _cells(tuple(float(boundary) for boundary in boundaries))
    if cells is None:
        return search(x)
    # A GPU loads from a small table beside its arithmetic, which selects would fill.
    return lax.platform_dependent(
        x, cuda=ft.partial(_look_up, cells=cells), default=search
    )


def _search(
    x: Float[Array, "*shape"], boundaries: Sequence[Any]
) -> UInt8[Array, "*shape"]:
    """A binary search by selects."""
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


@dataclasses.dataclass(frozen=True, eq=False)
class _Cells:
    """From the lowest to the highest boundary the line is cut into cells of one width,
    of which none has two boundaries. Which one a float is in never falls as it rises.
    So all that is left to compare with is the boundary there.

    - `low`, `high`: what is beyond counts as these.
    - `scale`, `offset`: `x * scale + offset` is from 8 to 12, and in its bits is the
        cell.
    - `ends`: in each cell the boundary, or infinity.
    - `below`: how many boundaries are in the cells before.
    """

    low: np.floating
    high: np.floating
    scale: np.floating
    offset: np.floating
    ends: np.ndarray
    below: np.ndarray


# Of which 32 are for 8 to 12, a line of a GPU's cache, and the others for a NaN, with
# whatever bits.
_num_cells = 64
_shift = 23 - 6  # The highest bits of a mantissa.


@ft.lru_cache(maxsize=64)
def _cells(boundaries: tuple[float, ...]) -> _Cells | None:
    """None if two of them are too close."""
    ends = np.array(boundaries, np.float32)
    high = np.nextafter(ends[-1], np.float32(np.inf))
    for exponent in range(-120, 64):  # By a power of two nothing is rounded.
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
    """By loads from two tables."""
    place = jnp.clip(x, cells.low, cells.high) * cells.scale + cells.offset
    # Without a sign, or JAX would look for indices from the end.
    cell = lax.bitcast_convert_type(place, jnp.uint32) >> jnp.uint32(_shift)
    cell = cell & jnp.uint32(_num_cells - 1)
    of = lambda table: jnp.asarray(table).at[cell].get(mode="promise_in_bounds")
    return of(cells.below) + (x > of(cells.ends)).astype(jnp.uint8)
