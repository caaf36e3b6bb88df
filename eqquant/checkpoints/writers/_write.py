"""Write the arrays of a model in the layout of a library."""

import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from ..._jax import is_traced
from ...arrays import is_implicit, QuantizedArray
from ...trees import errors_at, sites
from ..files import (
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
    write_arrays(library, target, arrays, original, max_shard_size, caller)


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


def write_arrays(
    library: Library,
    folder: pathlib.Path,
    arrays: Iterable[tuple[str, Any]],
    source: pathlib.Path | None,
    max_shard_size: int | None,
    caller: str,
) -> dict[str, str]:
    """Write named arrays one at a time. Return the layout of each quantized array."""
    if source is not None and source.resolve() == folder.resolve():
        raise ValueError(
            f"{caller}: folder and source must be different, got {folder} for both."
        )
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {}
    layouts: dict[str, str] = {}
    plain: list[str] = []
    with ShardWriter(folder, max_shard_size, {"format": "pt"}) as writer:
        for name, array in arrays:
            with errors_at(f"{caller}: {name!r}"):
                if any(map(is_traced, jax.tree.leaves(array))):
                    raise TypeError("is traced: call this outside of `jit`.")
                if isinstance(array, QuantizedArray):
                    packed = library.packed(name, array)
                    settings[name], layouts[name] = packed.settings, packed.layout
                    tensors = packed.tensors
                elif is_implicit(array):
                    raise TypeError(
                        f"is a {type(array).__name__}. Merge adapters and remove "
                        "wrappers first."
                    )
                else:
                    tensors = {name: to_numpy(array)}
                    if array.ndim == 2 and name.endswith(".weight"):
                        plain.append(name)
                for part, tensor in tensors.items():
                    writer.add(part, tensor)
        with errors_at(caller):
            config = library.config(settings, plain)
        writer.finish()
    if source is not None and source.is_dir():
        copy_others(source, folder, without=["config.json"])
    _write_config(folder, source, config)
    return layouts


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
