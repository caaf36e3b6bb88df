"""The bytes of a weight in a format."""

import math
from collections.abc import Sequence

from ..formats import Format
from ._conventions import Axis


def too_small(leaf, format: Format, axis: Axis, min_size: int = 256) -> str | None:
    """Return the reason why a weight is not worth quantizing, or None."""
    if leaf.size < min_size:
        return f"smaller than {min_size}"
    if bytes_as(leaf, format, axis) >= leaf.size * leaf.dtype.itemsize:
        return f"no smaller as {format!r}"
    return None


def bytes_as(leaf, format: Format, axis: Axis) -> float:
    """Return the bytes of an array after quantization along an axis."""
    size = row_size(leaf.shape, axis)
    return leaf.size / max(size, 1) * stored_bytes(size, format)


def row_size(shape: Sequence[int], axis: Axis) -> int:
    axes = (axis,) if isinstance(axis, int) else axis
    return math.prod(shape[a] for a in axes)


def stored_bytes(size: int, format: Format) -> float:
    """Return the bytes of a row, including scales and padding."""
    return format.padded(size) * format.bits / 8 + format.scale_bytes(size)


# The largest size of a window of a convolution, for advice.
_largest_window = 11


def likely_axes(shape: Sequence[int]) -> Axis:
    """Return the axes that a product probably contracts, for advice.

    The first axis of a convolution of `eqx.nn`, and the last axis of one of Flax, are
    outputs.
    """
    is_window = lambda sizes: len(sizes) and max(sizes) <= _largest_window
    if len(shape) > 2 and is_window(shape[2:]):
        return tuple(range(1, len(shape)))
    if len(shape) > 2 and is_window(shape[:-2]):
        return tuple(range(len(shape) - 1))
    return -1
