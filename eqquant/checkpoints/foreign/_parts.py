"""Look up and check the tensors that make up a weight."""

import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..files import Source, Tensor
from ._entry import Entry


SCALE_DTYPES = ("float16", "bfloat16", "float32")


class Parts:
    """The tensors of one prefix, such as `model.layers.0.mlp.up_proj.`.

    **Fields:**

    - `weight`: the name of the weight.
    - `path`: the file or the folder.
    - `where`: the same with the name of the weight, for errors.
    - `names`: the names of the tensors that were looked up.
    """

    weight: str
    path: pathlib.Path
    where: str
    names: list[str]

    def __init__(
        self, source: Source, prefix: str, library: str, weight: str = "weight"
    ):
        self._source, self._prefix = source, prefix
        self.weight = f"{prefix}{weight}"
        self.path = source.path
        self.where = f"{source.path}: {self.weight!r} of {library}"
        self.names = []

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._source.tensors

    def fail(self, problem: str):
        raise ValueError(f"{self.where} {problem}")

    def tensor(self, name: str) -> Tensor:
        if name not in self:
            self.fail(f"needs {name!r}, which is missing.")
        return self._source.tensors[self._prefix + name]

    def look_up(
        self, name: str, dtypes: Sequence[str], *shapes: tuple[int | None, ...]
    ) -> Tensor:
        """Return a tensor, which must have one of the dtypes and one of the shapes.
        `None` in a shape stands for any size."""
        found = self.tensor(name)
        fits = any(
            len(shape) == len(found.shape)
            and all(n in (None, m) for n, m in zip(shape, found.shape, strict=True))
            for shape in shapes
        )
        if found.dtype.name not in dtypes or not fits:
            shown = " or ".join(str(s).replace("None", "any") for s in shapes)
            raise ValueError(
                f"{self.where}: {name!r} must be {' or '.join(dtypes)} of the shape "
                f"{shown}, got {found.dtype.name} of {found.shape}."
            )
        self.names.append(found.name)
        return found

    def look_up_flat(self, name: str, dtype: str, size: int | None = None) -> Tensor:
        """Return a tensor of any shape, which must have the dtype and the size."""
        found = self.tensor(name)
        if found.dtype.name != dtype or size not in (None, found.size):
            count = "any number" if size is None else size
            self.fail(
                f"must have {count} of {dtype} in {found.name!r}, but has "
                f"{found.size} of {found.dtype}."
            )
        self.names.append(found.name)
        return found

    def read(self, name: str) -> np.ndarray:
        return self._source.read(self._prefix + name)

    def entry(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        decode: Callable[[], np.ndarray],
        quantized: Callable[[], Any],
        kind: tuple[str, bool],
    ) -> Entry:
        names = tuple(self.names)
        return Entry(self.where, shape, dtype, decode, quantized, kind, names)


def find_parts(source: Source, name: str, library: str) -> Iterator[Parts]:
    """Yield the parts of every weight that has a tensor of this name."""
    for found in source.tensors:
        prefix = found.removesuffix(name)
        if prefix != found and (not prefix or prefix.endswith(".")):
            yield Parts(source, prefix, library)
