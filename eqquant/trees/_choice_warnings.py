"""Warnings about arrays that were chosen."""

import math
from collections.abc import Sequence
from typing import Any

from .._jax import counted, warn
from ._size import bytes_as, likely_axes, row_size


def warn_of_quantized(choices: Sequence[Any], leaves: Sequence, caller: str) -> None:
    """Warn about quantized arrays that were chosen for another format."""
    others = [c for c in choices if leaves[c.index].format != c.format]
    if others:
        first = others[0]
        skipped = counted(
            len(others),
            "array is quantized already and is skipped",
            "arrays are quantized already and are skipped",
        )
        warn(
            f"{caller}: {skipped}, such as {first.path or 'the array'} in "
            f"{leaves[first.index].format!r}. Dequantize them first, with "
            "`eqquant.dequantize_tree`.",
            UserWarning,
        )


def warn_of_larger(choices: Sequence[Any], leaves: Sequence, caller: str) -> None:
    """Warn about arrays that quantization makes larger."""
    larger = [choice for choice in choices if _is_larger(leaves[choice.index], choice)]
    if not larger:
        return
    first, leaf = larger[0], leaves[larger[0].index]
    new = math.ceil(bytes_as(leaf, first.format, first.axis))
    advice, axes = "", likely_axes(leaf.shape)
    if axes != first.axis and bytes_as(leaf, first.format, axes) < new:
        advice = (
            f" Name the axes that its product contracts, probably {axes}: "
            f"`rules={{{first.path!r}: ({first.format.name!r}, {axes})}}`."
        )
    arrays = counted(len(larger), "array", "arrays")
    warn(
        f"{caller}: quantization makes {arrays} larger, such as "
        f"{first.path or 'the array'} of shape {tuple(leaf.shape)}: "
        f"{leaf.size * leaf.dtype.itemsize:,} bytes become {new:,} as "
        f"{first.format!r}, because rows along axis {first.axis} have "
        f"{row_size(leaf.shape, first.axis)} values.{advice}",
        UserWarning,
    )


def _is_larger(leaf: Any, choice: Any) -> bool:
    axes = (choice.axis,) if isinstance(choice.axis, int) else choice.axis
    if not all(-leaf.ndim <= axis < leaf.ndim for axis in axes) or not leaf.size:
        return False  # An error follows.
    before = leaf.size * leaf.dtype.itemsize
    return bytes_as(leaf, choice.format, choice.axis) > before
