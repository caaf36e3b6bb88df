"""What is in a checkpoint: leaves by path, described first, and read when they are
asked for."""

import functools as ft
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ...arrays import is_implicit, QuantizedArray
from ...formats import Format
from ..files import Source
from ._check import check_codes
from ._formats import known_formats
from ._processes import read_onto
from ._rebuild import Rebuilder


class Contents:
    """The leaves of a checkpoint.

    **Fields:**

    - `source`: where they come from.
    - `described`: each leaf by its path, with `jax.ShapeDtypeStruct`s for arrays. That
        all of it fits together was checked without reading a tensor.
    """

    source: Source
    described: dict[str, Any]

    def __init__(self, source: Source, formats: Sequence[type[Format]], caller: str):
        self.source = source
        known = known_formats(formats, caller)
        try:
            self._rebuilder = Rebuilder(source.records, source.tensors, known)
            self.described = {
                path: self._rebuilder.build(path, self._describe)
                for path in self._rebuilder.roots()
            }
            self._rebuilder.check_all_used()
        except ValueError as error:
            raise ValueError(f"{source.path}: {error}") from error

    def read(self, path: str, shardings: Sequence[Any] = ()) -> Any:
        """A leaf, its arrays those of NumPy, checked; or, where there is a sharding for
        a part, in the order in which JAX has them, on the devices of that."""
        these = iter(shardings)

        def get(name: str) -> Any:
            sharding = next(these, None)
            if sharding is None:
                return self.source.read(name)
            tensor = self.source.tensors[name]
            slices = ft.partial(self.source.read_slices, name)
            return read_onto(sharding, tensor.shape, tensor.dtype, slices)

        leaf = self._rebuilder.build(path, get)
        if is_implicit(leaf):
            try:
                check_codes(leaf)
            except ValueError as error:
                raise ValueError(f"{self.source.path}: {path}: {error}") from error
        return leaf

    @property
    def path(self) -> pathlib.Path:
        return self.source.path

    def are_quantized(self, names: Sequence[str]) -> bool:
        """Whether these come as quantized arrays, rather than as arrays."""
        return any(isinstance(self.described[n], QuantizedArray) for n in names)

    def read_array(self, name: str, dtype: Any) -> np.ndarray:
        """A tensor in another dtype."""
        return self.source.read(name, dtype)

    def _describe(self, name: str) -> jax.ShapeDtypeStruct:
        stored = self.source.tensors[name]
        return jax.ShapeDtypeStruct(stored.shape, stored.dtype)
