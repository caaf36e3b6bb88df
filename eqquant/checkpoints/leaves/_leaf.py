"""A leaf of a tree, as it goes into a file: tensors, and records of what is more.

A record says what `is` at its path: an array of eqquant's, whose parts are below that
path; a number or a string of Python; a random key; or an array of a dtype that
safetensors has no name for. Records are data. What they name is looked up in a table.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..files import Piece


# Each takes a byte.
_unnamed = ("float8_e4m3b11fnuz", "float8_e4m3", "float8_e3m4")
UNNAMED_DTYPES = {name: np.dtype(getattr(jnp, name)) for name in _unnamed}


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor to be: its name, how to make it, and which process does. It may be a
    piece of a larger one."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]
    owner: int = 0
    piece: Piece | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def whole(self) -> tuple[str, jax.ShapeDtypeStruct]:
        """The tensor that this is, or is a piece of: its name, and what it is like."""
        if self.piece is None:
            return self.name, jax.ShapeDtypeStruct(self.shape, self.dtype)
        return self.piece.of, jax.ShapeDtypeStruct(self.piece.shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of a tree, as it goes into a file."""

    path: str
    records: dict[str, dict[str, Any]]
    parts: tuple[Part, ...]

    def of(self, owner: int) -> "Leaf":
        """What one process writes of it. Records are those of the first."""
        parts = tuple(part for part in self.parts if part.owner == owner)
        return Leaf(self.path, {} if owner else self.records, parts)


def below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def saved_fields(cls: type) -> list[dataclasses.Field]:
    """Without those that say where an array is, rather than what."""
    return [f for f in dataclasses.fields(cls) if f.metadata.get("saved", True)]
