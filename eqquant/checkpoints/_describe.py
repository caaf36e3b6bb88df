"""Describe a checkpoint of any kind without reading its tensors."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._jax import typed
from ..arrays import is_implicit, is_quantized
from ..trees import as_text, nbytes
from .files import Path, Source
from .foreign import GGUFFile, is_gguf, safetensors_entries
from .leaves import Contents


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    !!! Example

        ```python
        import tempfile

        import eqquant
        import jax.numpy as jnp

        path = f"{tempfile.mkdtemp()}/model.safetensors"
        eqquant.save(path, {"weight": jnp.ones((8, 64))})
        tensor = eqquant.checkpoints.describe_checkpoint(path).tensors["weight"]
        assert tensor.shape == (8, 64) and not tensor.is_quantized
        ```

    **Fields:**

    - `type`: a dtype, a type of GGUF such as `"Q4_K"`, or the format of a quantized
        array.
    - `shape`, `size`: the shape and the number of elements of the decoded array.
    - `nbytes`: its bytes in the file.
    - `is_quantized`: whether it is a quantized array.
    - `is_exact`: whether a format of eqquant stores it without rounding, as far as the
        header of the file determines it.
    """

    type: str
    shape: tuple[int, ...]
    nbytes: int
    is_quantized: bool
    is_exact: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Description:
    """The contents of a checkpoint.

    !!! Example

        ```python
        import tempfile

        import eqquant
        import jax.numpy as jnp

        path = f"{tempfile.mkdtemp()}/model.safetensors"
        eqquant.save(path, {"weight": jnp.ones((8, 64))})
        description = eqquant.checkpoints.describe_checkpoint(path)
        assert list(description.tensors) == ["weight"]
        ```

    **Fields:**

    - `path`: the file or the index.
    - `kind`: `"GGUF"`, `"eqquant"` or `"safetensors"`.
    - `files`: the files, and the size of each in bytes.
    - `metadata`: the key-value pairs of the file.
    - `tensors`: the tensors by name.
    """

    path: pathlib.Path
    kind: str
    files: dict[pathlib.Path, int]
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        """The size of all files."""
        return sum(self.files.values())

    @property
    def summary(self) -> str:
        """One line: the path, the number of tensors and the size."""
        in_files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        tensors = f"{len(self.tensors)} tensors"
        return f"{self.path}: {tensors}, {self.nbytes:,} bytes in {in_files}"

    @property
    def formats(self) -> list[str]:
        """The types of quantized tensors."""
        return sorted({t.type for t in self.tensors.values() if t.is_quantized})

    def __str__(self) -> str:
        metadata = [f"{key}: {_short(value)}" for key, value in self.metadata.items()]
        by_type: dict[str, list[StoredTensor]] = {}
        for tensor in self.tensors.values():
            by_type.setdefault(tensor.type, []).append(tensor)
        types = [
            (type, f"{len(tensors):,}", *_sizes(tensors), _held(tensors))
            for type, tensors in sorted(by_type.items())
        ]
        everything = list(self.tensors.values())
        total = ("total", f"{len(everything):,}", *_sizes(everything), "")
        header = ("type", "tensors", "parameters", "bytes", "bits", "in eqquant")
        columns = ("path", "shape", "type", "bytes", "bits")
        each = [
            (name, "x".join(map(str, t.shape)) or "scalar", t.type, *_sizes([t])[1:])
            for name, t in self.tensors.items()
        ]
        return "\n\n".join(
            [
                "\n".join([self.summary, *metadata]),
                _with_rules([header, *types, total]),
                _with_rules([columns, *each, ("total", "", "", *total[3:5])]),
            ]
        )

    __repr__ = __str__


def _short(value: Any) -> str:
    """Return a value in one line. Vocabularies have 100,000s of tokens."""
    if isinstance(value, str):
        line = " ".join(value.split())
        return line if len(line) <= 100 else f"{line[:100]}... ({len(value):,} letters)"
    if isinstance(value, list | np.ndarray):
        return f"{len(value):,} values" if len(value) > 8 else str(list(value))
    return str(value)


def _with_rules(rows: Sequence[tuple[str, ...]]) -> str:
    first, *lines = as_text(rows)
    rule = "-" * max(map(len, [first, *lines]))
    return "\n".join([first, rule, *lines[:-1], rule, lines[-1]])


_counts = "size", "nbytes"


def _sizes(tensors: Sequence[StoredTensor]) -> tuple[str, str, str]:
    size, nbytes = (
        sum(x)
        for x in zip(*[(0, 0), *((t.size, t.nbytes) for t in tensors)], strict=True)
    )
    return f"{size:,}", f"{nbytes:,}", f"{8 * nbytes / size:.2f}" if size else "-"


def _held(tensors: Sequence[StoredTensor]) -> str:
    inexact = sum(not t.is_exact for t in tensors)
    if not inexact:
        return "exact"
    some = "" if inexact == len(tensors) else f"{inexact} of these "
    return f"{some}decoded to floats, with decode=True"


@typed
def describe_checkpoint(path: Path) -> Description:
    """Describe the tensors of a checkpoint, and return its metadata.

    !!! Example

        ```python
        import eqquant
        import numpy as np
        import tempfile

        path = f"{tempfile.mkdtemp()}/model.safetensors"
        eqquant.save(path, {"weight": np.ones((4, 64), np.float32)})
        found = eqquant.checkpoints.describe_checkpoint(path)
        assert found.tensors["weight"].shape == (4, 64)
        ```

    **Arguments:**

    - `path`: a file that [`eqquant.load`][] or
        [`eqquant.checkpoints.read_checkpoint`][] can read.

    **Returns:**

    A [`eqquant.checkpoints.Description`][]. Only the headers of the files are read.

    **Raises:**

    `ValueError` if the header is damaged or its kind is unknown. `FileNotFoundError` if
    the file does not exist.
    """
    where = pathlib.Path(os.fspath(path))
    if is_gguf(where):
        return _describe_gguf(where)
    with Source(where) as source:
        describe = _describe_ours if source.is_ours else _describe_safetensors
        return Description(
            source.path,
            "eqquant" if source.is_ours else "safetensors",
            {file.path: file.file_size for file in source.files},
            dict(source.metadata),
            describe(source),
        )


def _describe_gguf(path: pathlib.Path) -> Description:
    with GGUFFile(path) as file:
        tensors = {
            name: StoredTensor(
                stored.type.name,
                stored.shape,
                stored.stop - stored.start,
                stored.type.dtype is None,
                stored.is_exact,
            )
            for name, stored in file.tensors.items()
        }
        return Description(
            path, "GGUF", {path: path.stat().st_size}, file.metadata, tensors
        )


def _describe_ours(source: Source) -> dict[str, StoredTensor]:
    def describe(leaf: Any) -> StoredTensor:
        size = nbytes(leaf)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return StoredTensor(str(leaf.dtype), leaf.shape, size, False, True)
        format = getattr(leaf, "format", None)
        name = type(leaf).__name__ if format is None else repr(format)
        shape = leaf.shape if is_implicit(leaf) else ()
        return StoredTensor(name, shape, size, is_quantized(leaf), True)

    contents = Contents(source, (), "describe_checkpoint")
    return {path: describe(leaf) for path, leaf in contents.described.items()}


def _describe_safetensors(source: Source) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(
            entry.dtype.name if entry.quantized is None else entry.kind[0],
            entry.shape,
            sum(source.tensors[part].nbytes for part in entry.parts),
            entry.quantized is not None,
            entry.quantized is None or entry.kind[1],
        )
        for name, entry in safetensors_entries(source).items()
    }
