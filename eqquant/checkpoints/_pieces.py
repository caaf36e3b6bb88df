"""Quantizing an array of NumPy a few rows at a time."""

import math
from typing import Any

import jax
import numpy as np

from ..arrays import quantize
from ..formats import Format
from ..trees import Axis
from .files import empty, to_jax


# Elements. XLA makes float32 of shorter floats before anything else.
_piece = 2**20


def quantize_in_pieces(
    array: np.ndarray, format: Format, axis: Axis, *, check_finite: bool
) -> Any:
    """As `quantize`, bit for bit, in little memory. The parts are arrays of NumPy if
    there were several pieces."""
    axes = (axis,) if isinstance(axis, int) else axis
    blocked = {a % array.ndim for a in axes} if array.ndim else {0}
    # The first axis of more than one, if it can be cut, and the others are kept.
    lengths = array.shape
    cut = next((i for i, n in enumerate(lengths) if n > 1), 0)
    how = {"axis": axis, "check_finite": check_finite}

    def one(piece):
        return jax.block_until_ready(quantize(to_jax(piece), format, **how))

    count = math.ceil(array.size / _piece)
    if count < 2 or min(blocked) <= cut:
        return one(array)
    step = math.ceil(lengths[cut] / count)
    outs: list[np.ndarray] = []
    first: Any = None
    for start in range(0, lengths[cut], step):
        # The axes before this one have one element.
        place = (*(slice(None),) * cut, slice(start, start + step))
        # A copy: JAX may let go of what it took after the next array is read.
        parts, treedef = jax.tree.flatten(one(array[place].copy()))
        if not outs:
            first = treedef
            rows = lengths[cut]
            shapes = [(*p.shape[:cut], rows, *p.shape[cut + 1 :]) for p in parts]
            outs = [empty(s, p.dtype) for s, p in zip(shapes, parts, strict=True)]
        for out, part in zip(outs, parts, strict=True):
            out[place] = np.asarray(part)
    return jax.tree.unflatten(first, outs)
