"""The container of GGUF files, which llama.cpp and other users of ggml write.

A file is the magic number, the version, two counts, key-value pairs, a description of
each tensor, and the bytes of the tensors, each aligned. Everything is checked against
the size of the file before any tensor is read.
"""

import contextlib
import dataclasses
import math
import mmap
import os
import pathlib
import struct
from typing import Any, BinaryIO

import numpy as np

from ..files import MappedFile, Path
from ._ggml import Type, TYPES


MAGIC = b"GGUF"
# Version 2 made lengths 64 bits. Version 3 added big-endian files.
VERSIONS = (2, 3)
_default_alignment = 32
_max_axes = 4
_max_depth = 4
_shapes = "comfy.gguf.orig_shape."


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file. Its bytes are `start` to `stop`, counted from the start of
    the file. The last axis of `shape` is contiguous."""

    name: str
    type: Type
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def is_exact(self) -> bool:
        """Whether arrays of eqquant store it exactly: its type has a format, and blocks
        do not cross rows."""
        if self.type.dtype is not None:
            return True
        return self.type.format is not None and self.shape[-1] % self.type.block == 0


class GGUFFile(contextlib.AbstractContextManager):
    """An open file with a checked header.

    **Fields:**

    - `path`: the path of the file.
    - `metadata`: the key-value pairs. Without `vocabulary`, arrays of strings are
        skipped, and empty.
    - `pairs`: the first byte of each key-value pair, and the byte after it.
    - `tensors`: the tensors by name.
    """

    def __init__(self, path: Path, *, vocabulary: bool = True):
        self.path = pathlib.Path(path)
        self._file = open(self.path, "rb")  # noqa: SIM115
        self._mapped = MappedFile(self._file, self.path)
        try:
            reader = _Reader(self._file, str(self.path), vocabulary)
            self.metadata, self.pairs, self.tensors = _parse(reader)
        except BaseException:
            self._file.close()
            raise

    def __exit__(self, *_):
        self._file.close()

    def read(self, tensor: Tensor, rows: slice | None = None) -> np.ndarray:
        """Return the bytes of a tensor, or of some rows along its first axis, in the
        memory of the file."""
        start, stop = tensor.start, tensor.stop
        if rows is not None:
            rows_of_tensor = tensor.shape[0] if len(tensor.shape) > 1 else 1
            nbytes = (stop - start) // rows_of_tensor
            start, stop = start + rows.start * nbytes, start + rows.stop * nbytes
        return self._mapped.read(start, stop, tensor.name)

    def raw_pair(self, key: str) -> bytes:
        """Read the bytes of a key-value pair."""
        return self._mapped.read(*self.pairs[key], key).tobytes()


def is_gguf(path: pathlib.Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == MAGIC


class _Reader:
    """Read numbers and strings one after the other, within the bounds of the file."""

    def __init__(self, file: BinaryIO, where: str, vocabulary: bool):
        self.where, self.vocabulary = where, vocabulary
        self.size = os.fstat(file.fileno()).st_size
        self.position = 0
        # An empty file cannot be mapped.
        self._bytes: Any = b""
        if self.size:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def fail(self, problem: str):
        raise ValueError(f"{self.where}: {problem}")

    def take(self, count: int, name: str) -> bytes:
        if count > self.size - self.position:
            self._fail_truncated(name)
        start, self.position = self.position, self.position + count
        return self._bytes[start : self.position]

    def number(self, code: str, name: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(code), name))
        return value

    def string(self, name: str) -> str:
        return self.strings(1, name)[0]

    def strings(self, count: int, name: str, keep: bool = True) -> list[str]:
        """Read or skip strings in one loop, because vocabularies have 100,000s of
        them."""
        data, size, raws = self._bytes, self.size, []
        read_length, position = struct.Struct("<Q").unpack_from, self.position
        for _ in range(count):
            start = position + 8
            if start > size:
                self._fail_truncated(name)
            (length,) = read_length(data, position)
            position = start + length
            if position > size:
                self._fail_truncated(name)
            if keep:
                raws.append(data[start:position])
        self.position = position
        try:
            return [raw.decode() for raw in raws]
        except UnicodeDecodeError:
            self.fail(f"{name} is not UTF-8.")
            raise

    def _fail_truncated(self, name: str):
        self.fail(
            f"{name} would end beyond the file, which has {self.size} bytes: it is "
            "truncated or damaged."
        )

    def count(self, min_bytes: int, name: str) -> int:
        """Read a count of items that take at least `min_bytes` bytes each."""
        count = self.number("Q", name)
        if count * min_bytes > self.size - self.position:
            self.fail(f"{count} {name} do not fit in {self.size} bytes.")
        return count


# The `struct` codes of numeric value types. Type 8 is a string, and type 9 an array.
_numbers = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f"},
    **{10: "Q", 11: "q", 12: "d"},
}
_bool, _string, _array = 7, 8, 9


def _parse(
    reader: _Reader,
) -> tuple[dict[str, Any], dict[str, tuple[int, int]], dict[str, Tensor]]:
    if reader.take(4, "the magic number") != MAGIC:
        reader.fail("not a GGUF file.")
    version = reader.number("I", "the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        given = f"{swapped}, big-endian" if swapped in VERSIONS else f"{version}"
        reader.fail(
            f"version {given} of GGUF; eqquant reads {VERSIONS}, little-endian."
        )
    num_tensors = reader.count(24, "tensors")
    metadata: dict[str, Any] = {}
    pairs: dict[str, tuple[int, int]] = {}
    for _ in range(reader.count(13, "key-value pairs")):
        start = reader.position
        key = reader.string("a key")
        if key in metadata:
            reader.fail(f"the key {key!r} occurs more than once.")
        metadata[key] = _value(reader, reader.number("I", key), key)
        pairs[key] = start, reader.position
    described = [_describe(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _default_alignment)
    powers_of_two = [2**i for i in range(3, 17)]
    if type(alignment) is not int or alignment not in powers_of_two:
        reader.fail(
            "general.alignment must be a power of two from 8 to 65536, got "
            f"{alignment!r}."
        )
    count = metadata.get("split.count", 1)
    if type(count) is not int:
        reader.fail(f"split.count must be an integer, got {count!r:.80}.")
    if count not in (0, 1):
        reader.fail(
            f"the file is one of {count} parts. Merge them first, for example with "
            "`llama-gguf-split --merge`."
        )
    tensors = _place(reader, described, alignment)
    return metadata, pairs, _reshaped(reader, metadata, tensors)


def _reshaped(
    reader: _Reader, metadata: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Give tensors the shapes in the metadata. If blocks do not divide the rows of a
    tensor, ComfyUI stores rows of one block, and the shape separately."""
    shapes = {key: value for key, value in metadata.items() if key.startswith(_shapes)}
    for key, shape in shapes.items():
        name = key.removeprefix(_shapes)
        if name not in tensors:
            continue
        is_integers = isinstance(shape, np.ndarray) and shape.dtype.kind in "iu"
        sizes = tuple(shape.tolist()) if is_integers else ()
        expected = math.prod(tensors[name].shape)
        if not sizes or min(sizes) < 0 or math.prod(sizes) != expected:
            reader.fail(
                f"{key!r} must be a shape of {expected} elements, got {shape!r:.80}."
            )
        tensors[name] = dataclasses.replace(tensors[name], shape=sizes)
    return tensors


def _value(reader: _Reader, kind: int, key: str, depth: int = 0) -> Any:
    if kind in _numbers:
        return reader.number(_numbers[kind], key)
    if kind == _bool:
        value = reader.number("B", key)
        if value > 1:
            reader.fail(f"{key!r} has a bool of {value}; it must be 0 or 1.")
        return bool(value)
    if kind == _string:
        return reader.string(f"the string {key!r}")
    if kind != _array:
        reader.fail(f"{key!r} has a value of the unknown type {kind}.")
    if depth == _max_depth:
        reader.fail(f"{key!r} has arrays nested deeper than {_max_depth}.")
    element_kind = reader.number("I", key)
    if element_kind in _numbers:
        dtype = np.dtype(f"<{_numbers[element_kind]}")
        count = reader.count(dtype.itemsize, f"values of {key!r}")
        raw = reader.take(count * dtype.itemsize, key)
        return np.frombuffer(raw, dtype)
    min_bytes = {_bool: 1, _string: 8, _array: 12}.get(element_kind, 1)
    count = reader.count(min_bytes, f"values of {key!r}")
    if element_kind == _string:
        return reader.strings(count, f"the strings {key!r}", reader.vocabulary)
    return [_value(reader, element_kind, key, depth + 1) for _ in range(count)]


def _describe(reader: _Reader) -> tuple[str, Type, tuple[int, ...], int]:
    name = reader.string("the name of a tensor")
    axes = reader.number("I", name)
    if axes > _max_axes:
        reader.fail(f"{name!r} has {axes} axes; GGUF has at most {_max_axes}.")
    # The file lists the contiguous axis first.
    shape = tuple(reader.number("Q", name) for _ in range(axes))[::-1]
    code = reader.number("I", name)
    if code not in TYPES:
        reader.fail(f"{name!r} has the unknown type {code}.")
    kind = TYPES[code]
    if not math.prod(shape) < 2**63:
        reader.fail(f"{name!r} has the shape {shape}, which is too large.")
    last = shape[-1] if shape else 1
    if last % kind.block:
        reader.fail(
            f"{name!r} has rows of {last} values, which blocks of {kind.block} in "
            f"{kind.name} do not divide."
        )
    return name, kind, shape, reader.number("Q", name)


def _place(
    reader: _Reader, described: list[tuple[str, Type, tuple[int, ...], int]], align: int
) -> dict[str, Tensor]:
    """Compute the position of each tensor, and check that it lies in the file."""
    first = -(-reader.position // align) * align
    tensors: dict[str, Tensor] = {}
    for name, kind, shape, offset in described:
        if name in tensors:
            reader.fail(f"two tensors have the name {name!r}.")
        if offset % align:
            reader.fail(f"{name!r} is at {offset}, which is not a multiple of {align}.")
        stop = first + offset + math.prod(shape) // kind.block * kind.nbytes
        if stop > reader.size:
            reader.fail(
                f"{name!r} of the shape {shape} would end at byte {stop}, but the file "
                f"has {reader.size}: it is truncated or damaged."
            )
        tensors[name] = Tensor(name, kind, shape, first + offset, stop)
    position = first
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.stop)):
        if tensor.start < position:
            reader.fail(f"the tensor {tensor.name!r} overlaps another.")
        position = tensor.stop
    return tensors
