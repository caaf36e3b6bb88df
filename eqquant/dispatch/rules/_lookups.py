"""Lookups and replacements of whole rows by index: `gather` and `scatter`.

They are the same operation on the components. If the blocked axes are not the last axes
of an array, for example because it is transposed, it is permuted first.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ...arrays import as_views, ImplicitArray, inverse_order
from ._registry import register_names, rule_for


@rule_for(lax.gather_p)
def _gather(q, indices, *, dimension_numbers, slice_sizes, mode, fill_value):
    """Gather rows, or matrices of a stack, by the same gather on the components.

    Gathered rows are decoded, like in indexing.
    """
    if not isinstance(q, ImplicitArray):
        return NotImplemented
    ndim = len(dimension_numbers.offset_dims) + indices.ndim - 1
    array, axes = q.rows_last()
    rows = _Rows.of(
        (array, axes, array.whole_axes),
        ndim,
        dimension_numbers.offset_dims,
        dimension_numbers.collapsed_slice_dims,
        dimension_numbers.operand_batching_dims,
        dimension_numbers.start_index_map,
        mode=mode,
    )
    if rows is None or any(slice_sizes[axis] != q.shape[axis] for axis in rows.whole):
        return NotImplemented
    fill = fill_value
    if fill is not None and fill != 0 and fill == fill:
        return NotImplemented
    numbers = dimension_numbers._replace(
        offset_dims=rows.window,
        collapsed_slice_dims=rows.removed,
        operand_batching_dims=rows.batching,
        start_index_map=rows.starts,
    )
    sizes = [slice_sizes[axis] for axis in rows.indexed]

    def gather(a, fill):
        return lax.gather(
            a,
            rows.used(indices),
            numbers,
            (*sizes, a.shape[-1]),
            mode=mode,
            fill_value=fill,
        )

    out = rows.array.gather(gather, ndim, fill)
    # Under `vmap` an index is a slice of one element, whose axis is squeezed next.
    out = out if sum(size > 1 for size in slice_sizes) >= 2 else out.dequantize()
    out = out.transpose(inverse_order(rows.order))
    removed = tuple(dimension_numbers.collapsed_slice_dims)
    takes_matrices = (
        tuple(slice_sizes) == (1, *q.shape[1:])
        and [*dimension_numbers.offset_dims] == [*range(indices.ndim - 1, ndim)]
        and removed in ((), (0,))
        and not dimension_numbers.operand_batching_dims
    )
    if not takes_matrices or mode == lax.GatherScatterMode.FILL_OR_DROP:
        return out
    # Starts on all other axes are clamped to 0.
    index = indices[..., dimension_numbers.start_index_map.index(0)]
    return as_views(out, q, index, keeps_axis=not removed)


@register_names("scatter")
def _scatter(
    q,
    indices,
    updates,
    *,
    dimension_numbers,
    indices_are_sorted,
    unique_indices,
    mode,
):
    """Evaluate `q.at[indices].set(updates)` for whole rows."""
    if not isinstance(q, ImplicitArray) or isinstance(updates, ImplicitArray):
        return NotImplemented
    if q.updates_slices and indices.ndim == 1:
        return _set_slice(q, indices, updates, dimension_numbers, mode)
    rows = _Rows.of(
        q.rows_to_put(),
        updates.ndim,
        dimension_numbers.update_window_dims,
        dimension_numbers.inserted_window_dims,
        dimension_numbers.operand_batching_dims,
        dimension_numbers.scatter_dims_to_operand_dims,
        mode=mode,
    )
    if rows is None:
        return NotImplemented
    numbers = dimension_numbers._replace(
        update_window_dims=rows.window,
        inserted_window_dims=rows.removed,
        operand_batching_dims=rows.batching,
        scatter_dims_to_operand_dims=rows.starts,
    )

    def scatter(part, new):
        return lax.scatter(
            part,
            rows.used(indices),
            new,
            numbers,
            indices_are_sorted=indices_are_sorted,
            unique_indices=unique_indices,
            mode=mode,
        )

    out = rows.array.put(jnp.transpose(updates, rows.order), scatter)
    if out is NotImplemented:
        return NotImplemented
    return out.permute(inverse_order(rows.axes))


def _set_slice(q, indices, updates, numbers, mode):
    """Replace one slice of tokens. If it is out of bounds, drop or clamp it."""
    new = jnp.expand_dims(updates, numbers.inserted_window_dims)
    size = q.blocked_axes[-1]
    if new.shape[size] != q.shape[size] or not new.size:
        return NotImplemented
    start = [jnp.zeros((), indices.dtype)] * q.ndim
    for i, axis in enumerate(numbers.scatter_dims_to_operand_dims):
        start[axis] = indices[i]
    most = [full - part for full, part in zip(q.shape, new.shape, strict=True)]
    clamped = [jnp.clip(i, 0, n) for i, n in zip(start, most, strict=True)]
    if mode != lax.GatherScatterMode.FILL_OR_DROP:
        return q.update(new, clamped)
    inside = jnp.all(jnp.stack([a == b for a, b in zip(start, clamped, strict=True)]))
    return lax.cond(inside, lambda q: q.update(new, clamped), lambda q: q, q)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The dimension numbers of a gather or scatter of whole rows, for its components.

    **Fields:**

    - `array`: the array, with the axes of a row last.
    - `axes`: the permutation of the array to `array`.
    - `order`: the permutation of the gathered rows, or of the updates, after which the
        axes of a row are last.
    - `window`, `removed`, `batching`, `starts`: the dimension numbers for parts of
        `array` in which the axes of a row are flattened into one.
    - `columns`: the columns of the indices that `starts` keeps; None for all.
    - `count`: the number of axes of a row.
    """

    array: Any
    axes: tuple[int, ...]
    order: tuple[int, ...]
    window: tuple[int, ...]
    removed: tuple[int, ...]
    batching: tuple[int, ...]
    starts: tuple[int, ...]
    columns: tuple[int, ...] | None
    count: int

    @property
    def indexed(self) -> tuple[int, ...]:
        """The axes that are not part of a row."""
        return self.axes[: len(self.axes) - self.count]

    @property
    def whole(self) -> tuple[int, ...]:
        """The axes of a row."""
        return self.axes[len(self.indexed) :]

    def used(self, indices: Any) -> Any:
        """Return the columns of the indices that the parts have."""
        if self.columns is None:
            return indices
        return indices[..., np.array(self.columns, int)]

    @classmethod
    def of(
        cls,
        found: tuple[ImplicitArray, tuple[int, ...], int | None],
        ndim: int,
        *dimensions: Sequence[Any],
        mode: lax.GatherScatterMode,
    ) -> "_Rows | None":
        """Return the dimension numbers for parts, or None if parts of rows are indexed.

        `found` is an array with the axes of a row last, the permutation to it, and the
        number of axes of a row. The gathered rows, or the updates, have `ndim` axes.
        `dimensions` has `window`, `removed`, `batching` and `starts` for the whole
        array.
        """
        # Batching makes some of them NumPy integers.
        window, removed, batching, starts = ([*map(int, d)] for d in dimensions)
        array, axes, count = found
        if count is None:
            return None
        indexed = axes[: len(axes) - count]
        whole = axes[len(indexed) :]
        if {*removed, *batching} & {*whole}:
            return None
        kept = [i for i in range(array.ndim) if i not in {*removed, *batching}]
        place = dict(zip(kept, window, strict=True))
        last = [place[axis] for axis in whole]
        others = [i for i in range(ndim) if i not in last]
        columns = tuple(i for i, axis in enumerate(starts) if axis in indexed)
        # A row starts at 0, to which clamping moves other starts. Otherwise they fill.
        has_all = len(columns) == len(starts)
        if not has_all and mode == lax.GatherScatterMode.FILL_OR_DROP:
            return None
        return cls(
            array,
            axes,
            order=(*others, *last),
            window=(
                *(others.index(place[axis]) for axis in indexed if axis in place),
                len(others),
            ),
            removed=tuple(map(indexed.index, removed)),
            batching=tuple(map(indexed.index, batching)),
            starts=tuple(indexed.index(starts[i]) for i in columns),
            columns=None if has_all else columns,
            count=count,
        )
