"""Quantize a NumPy array in pieces of a few rows, to save memory."""

import math
from typing import Any

import jax
import numpy as np

from ..arrays import quantize
from ..formats import Format
from ..trees import Axis
from .files import empty, release, to_jax


# Elements per piece. XLA first converts shorter floats to float32, so large pieces take
# a lot of memory.
_piece = 2**20


def quantize_in_pieces(
    array: np.ndarray, format: Format, axis: Axis, *, check_finite: bool
) -> Any:
    """Quantize an array like `quantize`, bit for bit, in less memory. If there are
    several pieces, the parts of the result are NumPy arrays."""
    axes = (axis,) if isinstance(axis, int) else axis
    blocked = {a % array.ndim for a in axes} if array.ndim else {0}
    # Cut along the first axis with more than one element, unless it is blocked or
    # follows a blocked axis.
    lengths = array.shape
    cut = next((i for i, n in enumerate(lengths) if n > 1), 0)

    def quantize_piece(piece):
        q = quantize(to_jax(piece), format, axis=axis, check_finite=check_finite)
        return jax.block_until_ready(q)

    count = math.ceil(array.size / _piece)
    if count < 2 or min(blocked) <= cut:
        return quantize_piece(array)
    step = math.ceil(lengths[cut] / count)
    outs: list[np.ndarray] = []
    treedef: Any = None
    for start in range(0, lengths[cut], step):
        # Earlier axes have one element.
        place = (*(slice(None),) * cut, slice(start, start + step))
        # Copy: JAX may release its input only after the next piece is read.
        parts, treedef = jax.tree.flatten(quantize_piece(array[place].copy()))
        release(array[place])
        if not outs:
            rows = lengths[cut]
            shapes = [(*p.shape[:cut], rows, *p.shape[cut + 1 :]) for p in parts]
            outs = [empty(s, p.dtype) for s, p in zip(shapes, parts, strict=True)]
        for out, part in zip(outs, parts, strict=True):
            out[place] = np.asarray(part)
    return jax.tree.unflatten(treedef, outs)
