"""Read safetensors files: their checked header, and their tensors.

A file is the length of the header (eight bytes, little endian), the header (JSON), and
the bytes of the tensors without gaps. The whole header is checked against the size of
the file before any tensor is read, so no memory is allocated for invalid sizes.

The library `safetensors` writes tensors that all exist at once. This module uses the
memory of the file, or reads a tensor in chunks into memory that JAX uses directly. One
pass converts the dtype and checks the checksum. (As of version 0.8, that library also
lacks float8 for NumPy, and silently keeps one of two tensors with the same name.)
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._json import parse_object
from ._mapped import MappedFile, release
from ._memory import convert, empty


Path = str | os.PathLike

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(jnp.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(jnp.float8_e5m2fnuz),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}
# The limit of the library `safetensors`.
MAX_HEADER = 100_000_000
# The number of bytes that are read, checked and converted at once.
CHUNK = 2**22


# One slice for each axis, with a start and a stop.
Slices = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The name, dtype and shape of a tensor in a checkpoint."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Stored(Tensor):
    """A tensor in a file. Its bytes are `start` to `stop`, counted from the start of
    the file."""

    start: int
    stop: int


class TensorFile(contextlib.AbstractContextManager):
    """An open file with a checked header.

    **Fields:**

    - `path`: the path of the file.
    - `header`: the bytes of the header.
    - `metadata`: the strings in the header.
    - `tensors`: the tensors by name.
    - `checksums`: the CRC-32 of tensors by name, if a manifest has them.
    """

    def __init__(self, path: Path):
        self.path = pathlib.Path(path)
        self.checksums: dict[str, int] = {}
        if not self.path.is_file():
            raise ValueError(f"{self.path}: no such file.")
        self._file = self.path.open("rb")
        self._mapped, self._lock = MappedFile(self._file, self.path), threading.Lock()
        try:
            self.file_size = os.fstat(self._file.fileno()).st_size
            self.header = self._read_header()
            self.metadata, self.tensors = parse_header(
                self.header, self.file_size, str(self.path)
            )
        except BaseException:
            self._file.close()
            raise

    def __exit__(self, *_):
        self._file.close()

    def _read_header(self) -> bytes:
        start = self._file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > self.file_size - 8:
            raise ValueError(
                f"{self.path}: not a safetensors file, or truncated: the file has "
                f"{self.file_size} bytes, but its header should have {length}."
            )
        if length > MAX_HEADER:
            raise ValueError(
                f"{self.path}: the header must have at most {MAX_HEADER} bytes, but "
                f"has {length}."
            )
        return self._file.read(length)

    def read(self, name: str, dtype: Any = None) -> np.ndarray:
        """Read a tensor into new memory. `dtype` converts it in chunks."""
        stored = self.tensors[name]
        dtype = stored.dtype if dtype is None else np.dtype(dtype)
        out = empty(stored.shape, dtype)
        flat, step = out.reshape(-1), CHUNK // stored.dtype.itemsize

        def use(raw: np.ndarray, start: int) -> None:
            chunk = flat[start * step : (start + 1) * step]
            if dtype == stored.dtype:
                chunk.view(np.uint8)[...] = raw
            else:
                convert(raw.view(stored.dtype), chunk, f"{self.path}: {name!r}")
            release(raw)

        self._check_all(stored, use)
        return out

    def view(self, name: str) -> np.ndarray:
        """Return a tensor that uses the memory of the file, in any alignment. Pass it
        to [`kept`][], or to [`release`][] after use."""
        stored = self.tensors[name]
        raw = self._check_all(stored)
        return raw.view(stored.dtype).reshape(stored.shape)

    def _check_all(self, stored: Stored, use: Callable | None = None) -> np.ndarray:
        """Return the checked bytes of a tensor, after `use(chunk, number)` of each
        chunk."""
        raw, crc = self._mapped.read(stored.start, stored.stop, stored.name), 0
        for start in range(0, raw.size, CHUNK):
            chunk = raw[start : start + CHUNK]
            crc = self._check_chunk(chunk, stored, crc)
            if use is not None:
                use(chunk, start // CHUNK)
        self._check(crc, stored.name)
        return raw

    def read_slices(
        self, name: str, slices: Sequence[tuple[Slices, np.ndarray]]
    ) -> None:
        """Read slices of a tensor into arrays in one pass, one chunk at a time. Without
        a checksum, bytes outside of the slices are skipped."""
        with self._lock:  # Threads share the position in the file.
            self._read_slices(self.tensors[name], slices)

    def _read_slices(
        self, stored: Stored, slices: Sequence[tuple[Slices, np.ndarray]]
    ) -> None:
        name, crc = stored.name, 0
        self._file.seek(stored.start)

        def read(shape: tuple[int, ...], slices) -> None:
            """Read a part of this shape from the current position of the file."""
            nonlocal crc
            nbytes = math.prod(shape) * stored.dtype.itemsize
            if not slices and name not in self.checksums:
                self._file.seek(nbytes, os.SEEK_CUR)
            elif nbytes <= CHUNK:
                raw = np.empty(nbytes, np.uint8)
                crc = self._read_chunk(raw, stored, crc)
                array = raw.view(stored.dtype).reshape(shape)
                for place, out in slices:
                    out[...] = array[place]
            else:
                length, *row = shape
                step = max(CHUNK * length // nbytes, 1)
                for i in range(0, length, step):
                    rows = slice(i, min(i + step, length))
                    inner = [s for s in (overlap((rows,), *s) for s in slices) if s]
                    if step > 1:
                        read((rows.stop - i, *row), inner)
                    else:  # A single row may exceed a chunk.
                        read(tuple(row), [(place[1:], out[0]) for place, out in inner])

        read(stored.shape, list(slices))
        self._check(crc, name)

    def _check(self, crc: int, name: str) -> None:
        checksum = self.checksums.get(name, crc)
        if crc != checksum:
            raise ValueError(
                f"{self.path}: {name!r} has the CRC-32 {crc:08x}, but {checksum:08x} "
                "was saved: the file is damaged."
            )

    def _read_chunk(self, raw: np.ndarray, stored: Stored, crc: int) -> int:
        """Read the next bytes of a tensor into `raw`, and return the new CRC-32."""
        view, done = raw.data, 0
        while done < len(view):
            count = self._file.readinto(view[done:])
            if not count:
                raise ValueError(
                    f"{self.path}: the file ends inside of {stored.name!r}: it is "
                    "truncated."
                )
            done += count
        return self._check_chunk(raw, stored, crc)

    def _check_chunk(self, raw: np.ndarray, stored: Stored, crc: int) -> int:
        """Check the next bytes of a tensor, and return the new CRC-32."""
        if stored.dtype == np.bool_ and raw.size and raw.max() > 1:
            raise ValueError(
                f"{self.path}: {stored.name!r} has bools other than 0 and 1: the file "
                "is damaged."
            )
        return zlib.crc32(raw.data, crc) if stored.name in self.checksums else crc


def overlap(
    piece: Slices, place: Slices, out: np.ndarray
) -> tuple[Slices, np.ndarray] | None:
    """Intersect a piece with the place of `out`. Return the position in the piece and
    the part of `out` that it fills. A piece may have fewer axes: it has the first."""
    in_piece, in_out = [], []
    for p, s in zip(piece, place, strict=False):
        start, stop = max(p.start, s.start), min(p.stop, s.stop)
        if start >= stop:
            return None
        in_piece.append(slice(start - p.start, stop - p.start))
        in_out.append(slice(start - s.start, stop - s.start))
    return (*in_piece, *place[len(piece) :]), out[(*in_out,)]


def parse_header(
    header: bytes, file_size: int, where: str
) -> tuple[dict[str, str], dict[str, Stored]]:
    """Return the metadata and the tensors of a header. Raise a `ValueError` if they do
    not fit a file of `file_size` bytes."""
    parsed = parse_object(header, f"{where}: the header")
    metadata = parsed.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata  # Some libraries write null.
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise ValueError(f"{where}: __metadata__ must map strings to strings.")
    first = 8 + len(header)
    tensors = {
        name: _parse_tensor(name, entry, first, f"{where}: {name!r}")
        for name, entry in parsed.items()
    }
    position = first
    for stored in sorted(tensors.values(), key=lambda t: (t.start, t.stop)):
        if stored.start != position:
            problem = "overlaps another" if stored.start < position else "follows a gap"
            raise ValueError(f"{where}: the tensor {stored.name!r} {problem}.")
        position = stored.stop
    if position != file_size:
        raise ValueError(
            f"{where}: the tensors end at byte {position}, but the file has "
            f"{file_size} bytes: it is truncated or damaged."
        )
    return metadata, tensors


def _parse_tensor(name: str, entry: Any, first: int, where: str) -> Stored:
    expected = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or entry.keys() != expected:
        raise ValueError(f"{where} must have exactly the keys {sorted(expected)}.")
    dtype, shape, offsets = (entry[k] for k in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(
            f"{where}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}."
        )
    if not are_sizes(shape) or len(shape) > 32:
        raise ValueError(
            f"{where}: shape must be a list of up to 32 sizes, got {shape!r}."
        )
    if not are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(
            f"{where}: data_offsets must be a start and a stop, got {offsets!r}."
        )
    size = math.prod(shape) * DTYPES[dtype].itemsize
    start, stop = offsets
    if stop - start != size:
        raise ValueError(
            f"{where}: the shape {tuple(shape)} takes {size} bytes as {dtype}, but "
            f"data_offsets span {stop - start}."
        )
    return Stored(name, DTYPES[dtype], tuple(shape), first + start, first + stop)


def are_sizes(values: Any) -> bool:
    """Return whether `values` is a list of integers from 0 to 2**63 - 1."""
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 2**63 for value in values
    )
