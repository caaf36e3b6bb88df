"""NumPy arrays that JAX uses without a copy."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._mapped import may_stay, release
from ._pages import ALIGNMENT, HAS_HUGE_PAGES, HUGE, huge_pages


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Allocate an array like `np.empty`, aligned so that JAX uses the memory on a CPU
    without a copy.

    Arrays of 2 MiB or more use huge pages where Linux provides them.
    """
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= HUGE and HAS_HUGE_PAGES:
        raw = huge_pages(nbytes)
    else:
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        raw = raw[start : start + nbytes]
    return raw.view(dtype).reshape(shape)


def convert(source: np.ndarray, out: np.ndarray, where: str) -> None:
    """Write `source` into `out` in the dtype of `out`. Raise a `ValueError` if a value
    does not fit: a float that overflows to infinity, or an integer that changes."""
    floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (source, out))
    integers = all(jnp.issubdtype(x.dtype, jnp.integer) for x in (source, out))
    if not (floats or integers):
        raise ValueError(
            f"{where} is {source.dtype.name}, which does not convert to "
            f"{out.dtype.name}."
        )
    with np.errstate(over="ignore", invalid="ignore"):
        out[...] = source.astype(out.dtype)
    if floats:
        narrower = jnp.finfo(out.dtype).max < jnp.finfo(source.dtype).max
        lost = narrower and np.any(~np.isfinite(out) & np.isfinite(source))
    else:
        lost = not np.array_equal(out, source)
    if lost:
        raise ValueError(f"{where} has values that {out.dtype.name} cannot hold.")


def kept(array: Any) -> Any:
    """Return an array that may outlive its checkpoint. It is a copy if it uses the
    memory of a file and cannot stay there."""
    if may_stay(array):
        return array
    out = empty(array.shape, array.dtype)
    out[...] = array
    release(array)
    return out


def to_jax(array: Any) -> jax.Array:
    """Move a NumPy array or a random key to JAX, with the same values and dtype. On a
    CPU the memory of [`empty`][] and of files is not copied, so do not write to it
    afterwards."""
    out = jax.device_put(kept(array))
    if out.dtype != array.dtype:
        raise ValueError(
            f"{array.dtype.name} needs jax_enable_x64, which is off: JAX would convert "
            f"it to {out.dtype.name}."
        )
    return out


def with_abstract_arrays(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return `fn(tree)` for a function that reads only shapes and dtypes of arrays.
    Each `jax.ShapeDtypeStruct` becomes a tracer."""
    results = []
    eqx.filter_eval_shape(lambda tree: results.append(fn(tree)), tree)
    return results[0]


def to_numpy(array: Any) -> np.ndarray:
    """Return the values as a NumPy array, copied through the memory of the CPU.
    `np.asarray` of an array on another device would leave a second copy attached to
    that array."""
    if isinstance(array, jax.Array):
        (cpu, *_) = jax.local_devices(backend="cpu")
        if array.devices() != {cpu}:
            array = jax.device_put(array, cpu)
    return np.asarray(array)
