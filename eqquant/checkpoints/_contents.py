"""What is in a checkpoint: leaves by path, described first, and read when they are
asked for."""

from collections.abc import Sequence
from typing import Any

import jax

from ..arrays import is_implicit
from ..formats import Format
from ._check import check_codes
from ._formats import known_formats
from ._records import Rebuilder
from ._source import Source


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

    def read(self, path: str) -> Any:
        """A leaf, its arrays those of NumPy, checked."""
        leaf = self._rebuilder.build(path, self.source.read)
        if is_implicit(leaf):
            try:
                check_codes(leaf)
            except ValueError as error:
                raise ValueError(f"{self.source.path}: {path}: {error}") from error
        return leaf

    def _describe(self, name: str) -> jax.ShapeDtypeStruct:
        stored = self.source.tensors[name]
        return jax.ShapeDtypeStruct(stored.shape, stored.dtype)
