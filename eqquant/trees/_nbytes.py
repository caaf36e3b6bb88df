"""The size of a pytree."""

import math
from typing import Any

import jax

from .._jax import typed


@typed
def nbytes(model: Any) -> int:
    """Return the bytes of all arrays of a pytree.

    !!! Example

        ```python
        import eqquant
        import jax.numpy as jnp

        model = {"w": eqquant.quantize(jnp.ones((64, 256)), "nf4"), "b": jnp.ones(64)}
        assert eqquant.trees.nbytes(model) == 64 * 256 // 2 + 64 * 4 * 4 + 64 * 4
        ```
    """
    return sum(
        math.prod(x.shape) * x.dtype.itemsize
        for x in jax.tree.leaves(model)
        if hasattr(x, "shape") and hasattr(x, "dtype")
    )
