"""Huge pages, which cost products with few rows fewer TLB misses. These products are
limited by memory bandwidth."""

import contextlib
import mmap
from typing import Any

import jax
import numpy as np

from ._mapped import uses_file


HAS_HUGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")
HUGE = 2 << 20  # The size on most machines.
ALIGNMENT = 64  # JAX uses memory on a CPU without a copy if it has this alignment.
# Smaller arrays have only one page of 4 KiB. Pages that no array uses take no memory.
_least, _at_once = 1 << 12, 32 << 20


def huge_pages(nbytes: int) -> np.ndarray:
    """Allocate bytes that start with a huge page, if Linux provides them."""
    pages = mmap.mmap(-1, nbytes + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw = np.frombuffer(pages, np.uint8)
    start = -raw.ctypes.data % HUGE
    # Advise whole pages only: a partial page would make the array take more memory
    # than it needs. The call fails if Linux was built without huge pages.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE * HUGE)
    return raw[start : start + nbytes]


class SharedPages:
    """Huge pages for arrays that are smaller than one.

    All arrays in a page keep it in memory. So use this only for arrays that a program
    will keep or drop together, such as the quantized weights of a model.
    """

    def __init__(self):
        self._free = np.empty(0, np.uint8)
        self.helps = HAS_HUGE_PAGES and jax.default_backend() == "cpu"

    def copy(self, array: Any) -> Any:
        """Return a copy in the pages, or the array if it would not be faster there."""
        is_small = _least <= array.nbytes < HUGE
        if not self.helps or not is_small or uses_file(array):
            return array
        if len(self._free) < array.nbytes:
            self._free = huge_pages(_at_once)
        raw = self._free[: array.nbytes]
        self._free = self._free[-(-array.nbytes // ALIGNMENT) * ALIGNMENT :]
        out = raw.view(array.dtype).reshape(array.shape)
        out[...] = array
        return out
