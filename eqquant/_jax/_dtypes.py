"""Dtypes of intermediate values."""

from typing import Any

import jax
import jax.numpy as jnp


def wide_dtype(dtype: Any) -> Any:
    """Return the dtype of computations: at least float32."""
    with jax.numpy_dtype_promotion("standard"):  # Also if the user chose "strict".
        return jnp.promote_types(dtype, jnp.float32)
