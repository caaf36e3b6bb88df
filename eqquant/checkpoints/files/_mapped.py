"""Files whose bytes are used as memory, without a copy."""

import mmap
import os
import pathlib
import threading
from typing import Any, BinaryIO

import numpy as np


# Smaller arrays are copied, so that they do not keep a file open.
_least = 2**16
# JAX uses memory on a CPU without a copy if it has this alignment.
_alignment = 64


class _Map(mmap.mmap):
    """A map of a file. It ends with the last array that uses it."""

    address: int


class MappedFile:
    """The bytes of an open file.

    The map is private: a program that writes to an array does not change the file. The
    system reads pages when they are first used, and can drop them at any time.
    """

    def __init__(self, file: BinaryIO, path: pathlib.Path):
        self._file, self._path, self._lock = file, path, threading.Lock()
        self._bytes: np.ndarray | None = None

    def read(self, start: int, stop: int, name: str) -> np.ndarray:
        """Return bytes of the file as an array that uses the memory of the file.

        Reading from a map beyond the end of its file would end the process, so the size
        of the file is compared first.
        """
        number = self._file.fileno()
        if os.fstat(number).st_size < stop:
            raise ValueError(
                f"{self._path}: the file ends inside of {name!r}: it is truncated."
            )
        if start == stop:  # An empty file cannot be mapped.
            return np.empty(0, np.uint8)
        with self._lock:
            if self._bytes is None:
                mapped = _Map(number, 0, access=mmap.ACCESS_COPY)
                self._bytes = np.frombuffer(mapped, np.uint8)
                mapped.address = self._bytes.ctypes.data
        return self._bytes[start:stop]


def may_stay(array: Any) -> bool:
    """Return whether an array has memory of its own, or JAX can use it in the memory of
    its file. Windows cannot replace a file while it is mapped."""
    if _map_of(array) is None:
        return True
    is_aligned = array.ctypes.data % _alignment == 0
    return is_aligned and array.nbytes >= _least and os.name == "posix"


def uses_file(array: Any) -> bool:
    """Return whether an array uses the memory of a file."""
    return _map_of(array) is not None


def release(array: Any) -> None:
    """Let go of the memory of an array that uses the memory of a file.

    Its values stay valid, because the system can read them from the file again. Without
    this call, all pages that were read count as memory of the process.
    """
    found = _map_of(array)
    if found is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    bounds = np.lib.array_utils.byte_bounds(array)
    # Other arrays may use the first and the last page.
    start, stop = (bound - found.address for bound in bounds)
    start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = stop // mmap.PAGESIZE * mmap.PAGESIZE - start
    if nbytes > 0:
        found.madvise(mmap.MADV_DONTNEED, start, nbytes)


def _map_of(array: Any) -> _Map | None:
    """Return the map of a file whose memory an array uses, or `None`."""
    while isinstance(array, np.ndarray):
        array = array.base
    array = array.obj if isinstance(array, memoryview) else array
    return array if isinstance(array, _Map) else None
