"""The leaves in a checkpoint: described first, and read on demand."""

import functools as ft
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ...arrays import is_implicit, QuantizedArray
from ...formats import Format
from ...trees import errors_at
from ..files import Source
from ._check import check_codes
from ._formats import known_formats
from ._processes import read_onto
from ._rebuild import Rebuilder


class Contents:
    """The leaves of a checkpoint.

    **Fields:**

    - `source`: the open files.
    - `described`: each leaf by its path, with a `jax.ShapeDtypeStruct` for each array.
        Shapes, dtypes and records are already checked; tensors are not read yet.
    """

    source: Source
    described: dict[str, Any]

    def __init__(self, source: Source, formats: Sequence[type[Format]], caller: str):
        self.source = source
        known = known_formats(formats, caller)
        with errors_at(str(source.path)):
            self._rebuilder = Rebuilder(source.records, source.tensors, known)
            self.described = {
                path: self._rebuilder.build(path, self._describe)
                for path in self._rebuilder.roots()
            }
            self._rebuilder.check_all_used()

    def read(self, path: str, shardings: Sequence[Any] = ()) -> Any:
        """Read and check a leaf. Its arrays are NumPy arrays, possibly in the memory of
        the file, except where `shardings` (in the order of `jax.tree.leaves`) has a
        sharding instead of `None`."""
        remaining = iter(shardings)

        def get(name: str) -> Any:
            sharding = next(remaining, None)
            if sharding is None:
                return self.source.view(name)
            tensor = self.source.tensors[name]
            slices = ft.partial(self.source.read_slices, name)
            return read_onto(sharding, tensor.shape, tensor.dtype, slices)

        leaf = self._rebuilder.build(path, get)
        if is_implicit(leaf):
            with errors_at(f"{self.source.path}: {path}"):
                check_codes(leaf)
        return leaf

    @property
    def path(self) -> pathlib.Path:
        return self.source.path

    def abstract(self, path: str) -> Any:
        """Return a leaf with a `jax.ShapeDtypeStruct` for each array."""
        return self.described[path]

    def are_quantized(self, names: Sequence[str]) -> bool:
        """Return whether one of the named tensors is a quantized array."""
        return any(isinstance(self.described[n], QuantizedArray) for n in names)

    def read_array(self, name: str, dtype: Any) -> np.ndarray:
        """Read a tensor and convert it to `dtype`. It may use the memory of the
        file."""
        if self.source.tensors[name].dtype == dtype:
            return self.source.view(name)
        return self.source.read(name, dtype)

    def _describe(self, name: str) -> jax.ShapeDtypeStruct:
        stored = self.source.tensors[name]
        return jax.ShapeDtypeStruct(stored.shape, stored.dtype)
