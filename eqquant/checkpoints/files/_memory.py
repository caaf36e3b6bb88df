"""Arrays of NumPy that JAX takes as they are."""

import contextlib
import math
import mmap
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


# Of a huge page on most machines. Products with one row are bound by memory, and read
# it faster where addresses are looked up less often.
_huge = 2 << 20


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """As `np.empty`, aligned so that JAX on a CPU takes it as it is, without a copy; in
    huge pages if it is as large, and Linux has them."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= _huge and hasattr(mmap, "MADV_HUGEPAGE"):
        pages = mmap.mmap(-1, nbytes + _huge, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = np.frombuffer(pages, np.uint8)
        start = -raw.ctypes.data % _huge
        # Whole ones: with a part of one the array would hold more than it needs. Linux
        # may have been built without them.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE, start, nbytes // _huge * _huge)
    else:
        raw = np.empty(nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def convert(source: np.ndarray, out: np.ndarray, where: str) -> None:
    """Write numbers in another dtype. What that cannot hold is an error: infinity in
    place of a large float, or a wrong integer."""
    floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (source, out))
    integers = all(jnp.issubdtype(x.dtype, jnp.integer) for x in (source, out))
    if not (floats or integers):
        raise ValueError(f"{where} is {source.dtype.name}, not {out.dtype.name}.")
    with np.errstate(over="ignore", invalid="ignore"):
        out[...] = source.astype(out.dtype)
    if floats:
        narrower = jnp.finfo(out.dtype).max < jnp.finfo(source.dtype).max
        lost = narrower and np.any(~np.isfinite(out) & np.isfinite(source))
    else:
        lost = not np.array_equal(out, source)
    if lost:
        raise ValueError(f"{where} has values that {out.dtype.name} cannot hold.")


def to_jax(array: Any) -> jax.Array:
    """An array of NumPy, or a random key: the same numbers in the same dtype. On a CPU
    memory of [`empty`][] is not copied, so it must not be written to any more."""
    out = jax.device_put(array)
    if out.dtype != array.dtype:
        raise ValueError(
            f"{array.dtype.name} needs jax_enable_x64, which is off: JAX would make "
            f"{out.dtype.name} of it."
        )
    return out


def about_arrays(fn: Callable[[Any], Any], tree: Any) -> Any:
    """`fn(tree)`, for what asks of arrays no more than their shapes and dtypes: those
    that are only described are stood in for by those that JAX traces with."""
    found = []
    eqx.filter_eval_shape(lambda tree: found.append(fn(tree)), tree)
    return found[0]


def to_numpy(array: Any) -> np.ndarray:
    """The same numbers, by way of the memory of a CPU: an array on another device would
    keep the copy that `np.asarray` makes of it."""
    if isinstance(array, jax.Array):
        (cpu, *_) = jax.local_devices(backend="cpu")
        if array.devices() != {cpu}:
            array = jax.device_put(array, cpu)
    return np.asarray(array)
