"""Contractions as values."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..partition import Request


@dataclasses.dataclass(frozen=True)
class Contraction:
    """A contraction of an array with an activation `x`, without the two.

    **Fields:**

    - `over`: pairs of contracted axes, of the array and of `x`.
    - `batch`: pairs of batch axes.
    - `precision`, `out_dtype`: as in `lax.dot_general`.
    - `out_sharding`: how the result is split on a mesh with explicit axes.
    """

    over: Sequence[tuple[int, int]]
    batch: Sequence[tuple[int, int]] = ()
    precision: Any = None
    out_dtype: Any = None
    out_sharding: Request = None

    def __post_init__(self):
        for name in ("over", "batch"):  # Tuples can be hashed.
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def result_dtype(self, array: Any, x: Any) -> Any:
        return self.out_dtype or jnp.promote_types(x.dtype, array.dtype)
