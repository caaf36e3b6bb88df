"""The size of a pytree."""

import math
from typing import Any

import jax

from .._jax import typed


@typed
def tree_nbytes(model: Any) -> int:
    """Return the bytes of all arrays of a pytree."""
    return sum(
        math.prod(x.shape) * x.dtype.itemsize
        for x in jax.tree.leaves(model)
        if hasattr(x, "shape") and hasattr(x, "dtype")
    )
