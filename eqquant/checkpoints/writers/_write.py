"""Write the arrays of a model in the layout of a library."""

import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._jax import is_traced
from ...arrays import is_implicit, QuantizedArray
from ...trees import errors_at, sites
from ..files import (
    check_shard_size,
    copy_others,
    parse_object,
    Path,
    replacing,
    ShardWriter,
    Source,
    to_numpy,
)
from ..foreign import safetensors_entries
from ..leaves import is_no_data
from ._library import Library


Names = Callable[[str], Any]
METADATA = {"format": "pt"}  # Transformers requires it.


def write_model(
    library: Library,
    folder: Path,
    model: Any,
    names: Names | None,
    source: Path | None,
    max_shard_size: int | None,
    caller: str,
) -> None:
    """Write the arrays of a model into a folder, with the configuration of a library
    and the other files of `source`."""
    arrays = named_arrays(model, names, caller)
    original = None if source is None else pathlib.Path(os.fspath(source))
    if original is not None:
        arrays = _with_rest(arrays, original, caller)
    target = pathlib.Path(os.fspath(folder))
    check_target(target, original, max_shard_size, caller)
    with ShardWriter(target, max_shard_size, METADATA) as writer:
        write_arrays(library, writer, arrays, original, caller)


def named_arrays(
    model: Any, names: Names | None, caller: str
) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a model with their names in the checkpoint. A list of names
    unstacks an array."""
    used: set[str] = set()
    for site in sites(model):
        leaf = site.leaf
        if is_no_data(leaf) or not hasattr(leaf, "dtype"):
            continue
        named = site.path if names is None else names(site.path)
        if named is None:
            continue
        grid = np.asarray(named, dtype=object)
        if not all(isinstance(name, str) for name in grid.flat):
            raise TypeError(
                f"{caller}: names must return a name, a list of names or None, got "
                f"{named!r} for {site.path!r}."
            )
        if grid.shape != leaf.shape[: grid.ndim]:
            raise ValueError(
                f"{caller}: names returned names of the shape {grid.shape} for "
                f"{site.path!r}, which has the shape {leaf.shape}."
            )
        for index in np.ndindex(grid.shape):
            name: Any = grid[index]
            if name in used:
                raise ValueError(
                    f"{caller}: {name!r} would name two arrays, the second at "
                    f"{site.path!r}. Return another name, or None, from `names`."
                )
            used.add(name)
            yield name, leaf[index] if index else leaf


class Written(NamedTuple):
    """A quantized weight in a file of a library. The fields are fields of `Packed`."""

    layout: str
    is_exact: bool
    settings: Any = None


def write_arrays(
    library: Library,
    writer: ShardWriter,
    arrays: Iterable[tuple[str, Any]],
    source: pathlib.Path | None,
    caller: str,
) -> dict[str, Written]:
    """Write named arrays one at a time, and the configuration of the library. Return
    how each quantized array is stored, including arrays in adopted shards."""
    written = pack_arrays(library, writer, arrays, caller)
    settings = {name: packed.settings for name, packed in written.items()}
    notes = writer.notes
    with errors_at(caller):
        config = library.config(settings, [n for n in notes if notes[n] == "matrix"])
    writer.finish()
    if source is not None and source.is_dir():
        copy_others(source, writer.folder, without=["config.json"])
    _write_config(writer.folder, source, config)
    return written


def pack_arrays(
    library: Library,
    writer: ShardWriter,
    arrays: Iterable[tuple[str, Any]],
    caller: str,
) -> dict[str, Written]:
    """Pack named arrays one at a time, and add their tensors to the writer. Return how
    each quantized array is stored, including arrays in adopted shards."""
    notes = writer.notes
    for name, array in arrays:
        with errors_at(f"{caller}: {name!r}"):
            tensors, notes[name] = _packed(library, name, array)
            writer.add(tensors, name, notes[name])
    return {
        name: Written(note[0], note[1], _as_tuples(note[2]))
        for name, note in notes.items()
        if isinstance(note, list)
    }


def _packed(library: Library, name: str, array: Any) -> tuple[dict, Any]:
    """Return the tensors of an array and a note for the configuration, as JSON."""
    if any(map(is_traced, jax.tree.leaves(array))):
        raise TypeError("is traced: call this outside of `jit`.")
    if isinstance(array, QuantizedArray):
        packed = library.packed(name, array)
        return packed.tensors, [packed.layout, packed.is_exact, packed.settings]
    if is_implicit(array):
        raise TypeError(
            f"is a {type(array).__name__}. Merge adapters and remove wrappers first."
        )
    is_matrix = array.ndim == 2 and name.endswith(".weight")
    return {name: to_numpy(array)}, "matrix" if is_matrix else None


def _as_tuples(x: Any) -> Any:
    """Return settings that may have been stored as JSON."""
    return tuple(map(_as_tuples, x)) if isinstance(x, (list, tuple)) else x


def check_target(
    folder: pathlib.Path,
    source: pathlib.Path | None,
    max_shard_size: int | None,
    caller: str,
) -> None:
    """Raise an error unless a checkpoint can be written to a folder."""
    check_shard_size(max_shard_size, caller)
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"{caller}: expected a folder, but {folder} is a file. Pass another path."
        )
    if source is not None and source.resolve() == folder.resolve():
        raise ValueError(
            f"{caller}: folder and source must be different, got {folder} for both."
        )


def _write_config(
    folder: pathlib.Path, source: pathlib.Path | None, config: dict[str, Any]
) -> None:
    original: dict[str, Any] = {}
    if source is not None and (path := source / "config.json").is_file():
        original = parse_object(path.read_bytes(), str(path))
    for key in ("quantization_config", "quantization"):
        original.pop(key, None)
    if merged := original | config:
        with replacing(folder / "config.json") as file:
            file.write(json.dumps(merged, indent=2).encode() + b"\n")


def _with_rest(
    arrays: Iterator[tuple[str, Any]], path: pathlib.Path, caller: str
) -> Iterator[tuple[str, Any]]:
    """Check names and shapes against the tensors of a folder, and add the tensors that
    the model lacks."""
    with Source(path) as source:
        entries = safetensors_entries(source)
        for name, array in arrays:
            entry = entries.pop(name, None)
            if entry is None or entry.shape != array.shape:
                found = "no such tensor" if entry is None else f"it as {entry.shape}"
                raise ValueError(
                    f"{caller}: {name!r} has the shape {array.shape}, but {path} has "
                    f"{found}. Map paths of the model to its names with `names`."
                )
            yield name, array
        for name, entry in entries.items():
            if entry.quantized is not None:
                raise ValueError(
                    f"{caller}: the model has no {name!r}, which {path} stores "
                    "quantized. Map paths of the model to its names with `names`."
                )
            yield name, entry.decode()
