"""Describe a checkpoint of any kind without reading its tensors."""

import dataclasses
import os
import pathlib
from typing import Any

import jax

from .._jax import typed
from ..arrays import QuantizedArray
from .files import Path, Source, Tensor
from .foreign import GGUFFile, is_gguf, safetensors_entries
from .leaves import Contents


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    **Fields:**

    - `type`: a dtype, a type of GGUF such as `"Q4_K"`, or the format of a quantized
        array.
    - `shape`: the shape of the decoded array.
    - `nbytes`: its bytes in the file.
    - `is_exact`: whether a format of eqquant stores it without rounding, as far as the
        header of the file determines it.
    """

    type: str
    shape: tuple[int, ...]
    nbytes: int
    is_exact: bool


@dataclasses.dataclass(frozen=True)
class Description:
    """The contents of a checkpoint.

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
                stored.type.dtype is not None or stored.type.format is not None,
            )
            for name, stored in file.tensors.items()
        }
        return Description(
            path, "GGUF", {path: path.stat().st_size}, file.metadata, tensors
        )


def _nbytes(tensor: Tensor | jax.ShapeDtypeStruct) -> int:
    return tensor.dtype.itemsize * tensor.size


def _describe_ours(source: Source) -> dict[str, StoredTensor]:
    def describe(leaf: Any) -> StoredTensor:
        is_array = isinstance(leaf, QuantizedArray | jax.ShapeDtypeStruct)
        type = repr(leaf.format) if isinstance(leaf, QuantizedArray) else ""
        if not type:
            type = str(leaf.dtype) if is_array else "record"
        nbytes = sum(map(_nbytes, jax.tree.leaves(leaf)))
        return StoredTensor(type, getattr(leaf, "shape", ()), nbytes, True)

    contents = Contents(source, (), "describe_checkpoint")
    return {path: describe(leaf) for path, leaf in contents.described.items()}


def _describe_safetensors(source: Source) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(
            entry.dtype.name if entry.quantized is None else entry.kind[0],
            entry.shape,
            sum(_nbytes(source.tensors[part]) for part in entry.parts),
            entry.quantized is None or entry.kind[1],
        )
        for name, entry in safetensors_entries(source).items()
    }
