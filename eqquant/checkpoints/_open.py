"""Open a checkpoint of eqquant or another library for `load_quantized`."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from ..formats import Format
from .files import convert, empty, Path, release, Source
from .foreign import (
    ByRows,
    Entry,
    is_gguf,
    NotExact,
    open_entries,
    safetensors_entries,
)
from .leaves import Contents


class ForeignContents:
    """A checkpoint that another library quantized, with the interface of
    [`Contents`][]. With `decode`, a tensor becomes a float array if no format stores it
    exactly, and so does a stack of tensors that are quantized in different ways. With
    `"all"`, every tensor becomes a float array."""

    def __init__(
        self,
        entries: dict[str, Entry],
        path: pathlib.Path,
        decode: bool | Literal["all"],
    ):
        self.path = path
        self._entries, self._decode = entries, decode
        self.described = {
            name: jax.ShapeDtypeStruct(entry.shape, entry.dtype)
            for name, entry in entries.items()
        }

    def are_quantized(self, names: Sequence[str]) -> bool:
        if self._decode == "all":
            return False
        entries = [self._entries[name] for name in names]
        if not self._decode:
            return any(entry.quantized is not None for entry in entries)
        first = entries[0]
        alike = all(entry.kind == first.kind for entry in entries)
        return alike and first.quantized is not None and first.kind[1]

    def read(self, name: str) -> Any:
        return self._entries[name].read(decode=bool(self._decode))

    def abstract(self, name: str) -> Any:
        """Return a quantized array of `jax.ShapeDtypeStruct`s."""
        entry = self._entries[name]
        if entry.abstract is None:
            raise ValueError(
                f"{entry.where}: its format is only known after reading, so "
                "abstract=True is not possible."
            )
        return entry.abstract()

    def by_rows(self, name: str) -> ByRows | None:
        """Return a reader of some rows of a quantized tensor, or `None`."""
        entry = self._entries[name]
        by_rows = entry.by_rows
        if by_rows is None:
            return None

        def read(rows: slice, out: Any) -> Any:
            try:
                return by_rows.read(rows, out)
            except NotExact as error:
                way_out = 'decode="all"' if self._decode else "decode=True"
                raise entry.not_exact(error, way_out) from None

        return dataclasses.replace(by_rows, read=read)

    def read_array(self, name: str, dtype: Any) -> np.ndarray:
        entry = self._entries[name]
        decoded = entry.decode()
        if decoded.dtype == dtype:
            return decoded
        out = empty(entry.shape, dtype)
        convert(decoded, out, entry.where)
        release(decoded)
        return out


@contextlib.contextmanager
def open_contents(
    path: Path,
    formats: Sequence[type[Format]],
    caller: str,
    *,
    decode: bool | Literal["all"],
) -> Iterator[Contents | ForeignContents]:
    """Open a checkpoint, and find out whether eqquant wrote it."""
    where = pathlib.Path(path)
    if is_gguf(where):
        with open_entries(where) as entries:
            yield ForeignContents(entries, where, decode)
        return
    with Source(path) as source:
        entries = {} if source.is_ours else safetensors_entries(source)
        if any(entry.quantized is not None for entry in entries.values()):
            yield ForeignContents(entries, source.path, decode)
        else:
            yield Contents(source, formats, caller)
