"""The blocked axes of an array."""

from collections.abc import Sequence


def canonical_axes(axis: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Check axes, and return them sorted and counted from the end."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    for a in axes:
        if not -ndim <= a < ndim:
            raise ValueError(
                f"axis must be between {-ndim} and {ndim - 1} for an array of {ndim} "
                f"axes, got {axis}."
            )
    out = tuple(sorted(a % ndim - ndim for a in axes))
    if not out or len(set(out)) != len(out):
        raise ValueError(f"axis must name one axis or several distinct, got {axis}.")
    return out
