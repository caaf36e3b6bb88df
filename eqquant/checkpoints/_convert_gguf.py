"""Write GGUF files one tensor at a time, for quantization and conversion on disk.

A GGUF file starts with the types of all tensors, which are known when the last one is
packed. So packed tensors wait in shards, which an interrupted call also resumes from.
"""

import contextlib
import functools as ft
import os
import pathlib
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import jax

from ..arrays import quantize, QuantizedArray
from ..trees import Choice, errors_at
from .files import ShardWriter, sync_folder
from .foreign import GGUFFile, is_gguf, TYPES
from .writers import (
    GGUFTensor,
    Library,
    NotHeld,
    pack_arrays,
    Packed,
    to_ggml,
    type_of,
    write_gguf_like,
    write_gguf_tensors,
    Written,
)


GGUF = ".gguf"
_types = {type.name: type for type in TYPES.values()}


def as_described(choice: Choice, like: jax.ShapeDtypeStruct) -> Any:
    """Return an abstract quantized array."""
    return jax.eval_shape(lambda x: quantize(x, choice.format, axis=choice.axis), like)


class GGUFLibrary(Library):
    """The blocks of ggml, as arrays of bytes. The settings of a weight are its type and
    its shape."""

    name = "GGUF"

    def pack(self, name: str, q: QuantizedArray) -> Packed:
        try:
            type = type_of(q)
            return Packed({name: to_ggml(type, q)}, type.name, (type.name, q.shape))
        except ValueError as error:
            raise NotHeld(str(error)) from error

    def packed(self, name: str, q: QuantizedArray) -> Packed:
        return self.pack(name, q)  # `to_ggml` raises an error for inexact scales.


def write_converted(
    target: pathlib.Path,
    source: pathlib.Path,
    described: dict[str, Any],
    arrays: Callable[[Container[str]], Iterator[tuple[str, Any]]],
    library: Library,
    max_shard_size: int | None,
    key: str | None,
    caller: str,
) -> dict[str, Written]:
    """Write a GGUF file. `arrays(done)` yields the arrays by name, except for names in
    `done`. Return how each quantized array is stored."""
    for name, found in described.items():
        # The types of quantized arrays follow from their values.
        is_floats = isinstance(found, jax.ShapeDtypeStruct)
        like = found if is_floats or not hasattr(found, "dtype") else _floats(found)
        if hasattr(like, "dtype"):
            GGUFTensor.of(name, like, lambda: None, caller)
    with _shards(target, max_shard_size, key) as writer:
        rest = arrays(frozenset(writer.notes))
        written = pack_arrays(library, writer, rest, caller)
        original = source if is_gguf(source) else None
        with _assembling(target, writer, written, caller) as (part, tensors):
            write_gguf_like(part, list(tensors.values()), original, {}, caller)
    return written


def _floats(found: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(found.shape, "float32")


def write_quantized(
    src: pathlib.Path,
    dst: pathlib.Path,
    choices: dict[str, Choice],
    make: Callable[[str], Any],
    max_shard_size: int | None,
    key: str,
    show: Callable[[list[str]], Iterable[str]],
    caller: str,
) -> None:
    """Write a GGUF file in which `make` quantizes some tensors. Copy all others. `show`
    wraps the names of the tensors in a progress bar."""
    with GGUFFile(src) as source:
        for name, stored in source.tensors.items():
            if name in choices:
                like = jax.ShapeDtypeStruct(stored.shape, "float32")
                described = as_described(choices[name], like)
                GGUFTensor.of(name, described, lambda: None, caller)
            elif stored.shape and stored.shape[-1] % stored.type.block:
                raise ValueError(
                    f"{caller}: {name!r} has blocks of {stored.type.block} in "
                    f"{stored.type.name}, which cross its rows of {stored.shape[-1]}. "
                    "Add a rule that quantizes it."
                )
        with _shards(dst, max_shard_size, key) as writer:
            rest = [name for name in choices if name not in writer.notes]
            arrays = ((name, make(name)) for name in show(rest))
            written = pack_arrays(GGUFLibrary(), writer, arrays, caller)
            with _assembling(dst, writer, written, caller) as (part, packed):
                tensors = [
                    packed.get(name) or GGUFTensor.copy(source, name)
                    for name in source.tensors
                ]
                write_gguf_tensors(part, tensors, source, {}, caller)


def _shards(path: pathlib.Path, max_size: int | None, key: str | None) -> ShardWriter:
    return ShardWriter(path.parent, max_size, {}, key, f".{path.name}.unfinished-")


@contextlib.contextmanager
def _assembling(
    path: pathlib.Path, writer: ShardWriter, written: dict[str, Written], caller: str
) -> Iterator[tuple[pathlib.Path, dict[str, GGUFTensor]]]:
    """Yield a path in the hidden folder, and the tensors of all shards. The file at
    this path becomes `path` at the end."""
    part = writer.temporary / "whole"
    with writer.tensors() as read:
        tensors = {}
        for name in writer.notes:
            make = ft.partial(read, name)
            if name in written:
                type, shape = written[name].settings
                tensors[name] = GGUFTensor(name, _types[type], shape, make)
            else:
                with errors_at(caller):
                    tensors[name] = GGUFTensor.of(name, read(name), make, caller)
        yield part, tensors
    os.replace(part, path)
    sync_folder(path.parent)


def write_metadata(src: pathlib.Path, dst: pathlib.Path, caller: str) -> None:
    """Write a GGUF file with the metadata and the tokenizer of another, and no
    tensors."""
    with GGUFFile(src) as source:
        write_gguf_tensors(dst, [], source, {}, caller)
