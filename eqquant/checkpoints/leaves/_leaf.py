"""A leaf of a tree in the form in which it is written: tensors and records.

A record describes a leaf that is more than a tensor: an array class of eqquant, whose
parts are stored below its path; a Python number or string; a random key; or an array of
a dtype that safetensors cannot name. Records are data: names in them are looked up in a
table.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..files import Piece, Tensor


# Each of these dtypes takes one byte per element.
_unnamed = ("float8_e4m3b11fnuz", "float8_e4m3", "float8_e3m4")
UNNAMED_DTYPES = {name: np.dtype(getattr(jnp, name)) for name in _unnamed}


@dataclasses.dataclass(frozen=True)
class Part(Tensor):
    """A tensor to be written, or a piece of one, with the function that makes it, and
    the process that owns it."""

    make: Callable[[], np.ndarray]
    owner: int = 0
    piece: Piece | None = None

    @property
    def whole(self) -> tuple[str, jax.ShapeDtypeStruct]:
        """The name and the description of the whole tensor."""
        if self.piece is None:
            return self.name, jax.ShapeDtypeStruct(self.shape, self.dtype)
        return self.piece.of, jax.ShapeDtypeStruct(self.piece.shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of a tree: its path, its records by path, and its tensors."""

    path: str
    records: dict[str, dict[str, Any]]
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def owned_by(self, owner: int) -> "Leaf":
        """Return the part that one process writes. The first process also writes the
        records."""
        parts = tuple(part for part in self.parts if part.owner == owner)
        return Leaf(self.path, {} if owner else self.records, parts)


def below(path: str, name: str) -> str:
    """Return the path of a part below a path."""
    return f"{path}.{name}" if path else name


def saved_fields(cls: type) -> list[dataclasses.Field]:
    """Return the fields that are saved: all except fields that describe the placement
    of an array."""
    return [f for f in dataclasses.fields(cls) if f.metadata.get("saved", True)]
