"""Indexing of implicit arrays, on their parts."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..partition import has_explicit_split, look_up, split_by_type
from ._implicit import ImplicitArray
from ._materialise import materialise


def index_array(q: ImplicitArray, index: Any):
    """Return `q[index]`.

    An integer removes its axis. A result with fewer than two axes of the array
    consists of rows, and is decoded.
    """
    entries = _per_axis(index, q.shape)
    by_axis = [entry for entry in entries if entry is not None]
    if any(_is_array(entry) for entry in by_axis):
        return _gather(q, entries, by_axis)
    if _is_looked_up(q, by_axis[0]):
        # JAX does not slice a sharded axis, but a lookup accepts an output sharding.
        row, *others = entries
        if row is not None:
            return index_array(q, (jnp.asarray(row)[None], *others))[0]

    start, limit, strides, integers = [], [], [], []
    for axis, (entry, size) in enumerate(zip(by_axis, q.shape, strict=True)):
        if isinstance(entry, slice):
            first, stop, step = entry.indices(size)
            if step < 1:
                return _decoded(q, index)
            start.append(first)
            limit.append(max(first, stop))
            strides.append(step)
        else:
            integers.append(axis)
            start.append(0)
            limit.append(size)
            strides.append(1)

    blocked = set(q.blocked_axes)
    lead_integers = [axis for axis in integers if axis not in blocked]
    out = q
    if lead_integers:
        starts: list[Any] = [0] * q.ndim
        sizes = list(q.shape)
        for axis in lead_integers:
            starts[axis], sizes[axis] = _wrap(by_axis[axis], q.shape[axis]), 1
            limit[axis] = 1
        out = out.dynamic_slice(starts, sizes)
    cut = out.slice(start, limit, strides)
    if cut is NotImplemented or blocked & set(integers):
        # The index cuts blocks. Index the other axes first, and decode only the result.
        for axis in blocked:
            start[axis], limit[axis], strides[axis] = 0, q.shape[axis], 1
        rows = out.slice(start, limit, strides)
        part = (
            rows.dequantize()
            if rows.size < q.size
            else materialise(q, "indexing across blocks", "warn")
        )
        rest = [
            entry if axis in blocked else 0 if axis in integers else slice(None)
            for axis, entry in enumerate(by_axis)
        ]
        return part[_with_new_axes(entries, rest)]
    if integers:
        cut = cut.squeeze(integers)
    if None not in entries:
        return cut
    kept = [entry for entry in entries if entry is None or isinstance(entry, slice)]
    sizes = iter(cut.shape)
    shape = [1 if entry is None else next(sizes) for entry in kept]
    where = [i for i, entry in enumerate(kept) if entry is not None]
    if isinstance(cut, jax.Array):  # Decoded rows.
        return cut.reshape(shape)
    return cut.broadcast_in_dim(shape, where)


def _per_axis(index: Any, shape: tuple[int, ...]) -> list:
    """Return one entry per axis (a slice, an integer or an array), and None for new
    axes."""
    entries = list(index) if isinstance(index, tuple) else [index]
    used = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if used > len(shape):
        raise IndexError(f"too many indices for an array of shape {shape}: {index}.")
    fill = [slice(None)] * (len(shape) - used)
    where = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    if len(where) > 1:
        raise IndexError("an index can have only one Ellipsis.")
    at = where[0] if where else len(entries)
    entries[at : at + 1] = fill
    out, axis = [], 0
    for entry in entries:
        if isinstance(entry, list):
            entry = np.asarray(entry)
        if entry is not None:
            if not isinstance(entry, slice):
                _check_integer(entry, shape[axis])
            axis += 1
        out.append(entry)
    return out


def _check_integer(entry: Any, size: int) -> None:
    dtype = np.asarray(entry).dtype if not hasattr(entry, "dtype") else entry.dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            "a quantized array is indexed by integers, slices, None, Ellipsis and "
            f"arrays of integers; got {entry!r}."
        )
    if isinstance(entry, int | np.integer) and not -size <= entry < size:
        raise IndexError(f"index {entry} is out of bounds for an axis of size {size}.")


def _is_array(entry: Any) -> bool:
    return getattr(entry, "ndim", 0) > 0


def _is_slice(entry: Any) -> bool:
    return isinstance(entry, slice)


def _takes_all(entry: Any) -> bool:
    return isinstance(entry, slice) and entry == slice(None)


def _wrap(entry: Any, size: int):
    if isinstance(entry, int | np.integer):
        return operator.index(entry) % size
    if jnp.issubdtype(entry.dtype, jnp.unsignedinteger):
        return entry
    # A short integer may not hold the size.
    entry = entry.astype(jnp.promote_types(entry.dtype, jnp.int32))
    return jnp.where(entry < 0, entry + size, entry)


def _gather(q: ImplicitArray, entries: list, by_axis: list):
    """Index the parts by arrays, if the index takes all of the rows."""
    rows, axes = q.rows_last()
    n = rows.whole_axes
    if n is None or not all(_takes_all(by_axis[axis]) for axis in axes[-n:]):
        return _decoded(q, tuple(entries))
    with_axes = [i for i, entry in enumerate(entries) if entry is not None]
    whole = [with_axes[axis] for axis in axes[-n:]]
    indexed = [i for i in range(len(entries)) if i not in whole]
    index = tuple(entries[i] for i in indexed)
    order = [*_axes_of_result(entries, indexed), *whole]
    out = rows.gather(lambda a, _: _look_up(a, (*index, slice(None))), len(order))
    sliced = sum(isinstance(entry, slice) for entry in by_axis)
    out = out if sliced >= 2 else out.dequantize()
    wanted = _axes_of_result(entries, range(len(entries)))
    return out.transpose([order.index(axis) for axis in wanted])


def _axes_of_result(entries: list, places: Sequence[int]) -> list:
    """Return the axes that indexing by some of the entries makes, in order.

    An axis of a slice, or a new axis, is the place of its entry. The axes of the
    broadcast index arrays, `"found 0"` and so on, are in the place of the first index,
    or at the front if the indices are apart.
    """
    by_array = [entries[i] is not None and not _is_slice(entries[i]) for i in places]
    arrays = [entries[i] for i, found in zip(places, by_array, strict=True) if found]
    shape = np.broadcast_shapes(*map(np.shape, arrays))
    first = by_array.index(True)
    apart = not all(by_array[first : first + len(arrays)])
    out: list = [i for i, found in zip(places, by_array, strict=True) if not found]
    at = 0 if apart else first
    out[at:at] = [f"found {i}" for i in range(len(shape))]
    return out


def _is_looked_up(q: ImplicitArray, entry: Any) -> bool:
    """Return whether a mesh with explicit axes splits the first axis or the indices."""
    codes = jax.tree.leaves(q)[0]
    if isinstance(entry, slice) or not has_explicit_split(codes):
        return False
    is_row = q.ndim == 2 and isinstance(entry, jax.Array)
    return is_row or bool(split_by_type(codes)[0])


def _look_up(a, index: tuple):
    rows, *others = index
    if not has_explicit_split(a) or not all(map(_takes_all, others)):
        return a[index]
    return look_up(a, rows)


def _with_new_axes(entries: list, by_axis: list) -> tuple:
    axes = iter(by_axis)
    return tuple(None if entry is None else next(axes) for entry in entries)


def _decoded(q: ImplicitArray, index: Any):
    return materialise(q, "this indexing", "warn")[index]
