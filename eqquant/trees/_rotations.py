"""Rotations by path."""

from collections.abc import Mapping

from ..arrays import check_rotation
from ._rules import matches


# Whether to rotate, or the largest block, for all weights or by patterns.
Rotations = bool | int | Mapping[str, bool | int]


def check_rotations(caller: str, rotate: Rotations) -> None:
    """Raise a `ValueError` for a value that is neither a bool nor a block size."""
    values = rotate.values() if isinstance(rotate, Mapping) else (rotate,)
    for value in values:
        check_rotation(caller, value)


def rotation_of(path: str, rotate: Rotations) -> bool | int:
    """Return the rotation of a weight: the first pattern that matches, or False."""
    if not isinstance(rotate, Mapping):
        return rotate
    found = (value for pattern, value in rotate.items() if matches(pattern, path))
    return next(found, False)
