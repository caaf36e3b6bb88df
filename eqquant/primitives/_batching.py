"""Mapped axes of the operands of a primitive."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


def map_first(size: int, a: Any, dim: int | None) -> Any:
    """Move the mapped axis of an array to the front. If there is none, repeat it."""
    if dim is None:
        return jnp.broadcast_to(a, (size, *a.shape))
    return jnp.moveaxis(a, dim, 0)


def map_all_first(args: Sequence[Any], dims: Sequence[int | None]) -> list:
    """Move the mapped axis of all operands to the front. One of them has it."""
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    return [map_first(size, a, d) for a, d in zip(args, dims, strict=True)]
