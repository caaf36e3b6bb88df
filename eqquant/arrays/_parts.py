"""Structural operations on an array that is stored in parts."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._axes import (
    Axes,
    Broadcast,
    DynamicSlice,
    Gather,
    Operation,
    Permute,
    Reshape,
    Reverse,
    Role,
    Slice,
    Squeeze,
)
from ._matrices import other_axes
from ._partition import Partitioned


class ArrayInParts(Partitioned):
    """The structure of an array in parts, and the operations that only move elements.

    A subclass declares which logical axes each part has, in [`axes_of_parts`][], and
    which of its static fields hold axes, in `roles`. All structural operations follow
    from that. They are exact, never decode, and return an array of the same class, or
    `NotImplemented` if that is not possible.
    """

    # The static fields that hold axes, counted from the end, and the role of each.
    roles: ClassVar[Mapping[str, Role]] = {}

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that the parts stand for, derived from the parts."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def replace(self, **fields):
        names = [field.name for field in dataclasses.fields(self)]
        return type(self)(**{n: fields.get(n, getattr(self, n)) for n in names})

    @abc.abstractmethod
    def axes_of_parts(self, ndim: int, groups: Mapping[str, Sequence[int]]) -> Any:
        """Return a dictionary with the axes of each part, by the name of its field.

        `ndim` is the number of logical axes. `groups` has the axes that the fields in
        `roles` hold, counted from the front. An implicit array among the parts must
        have all logical axes, or its leading axes and an ellipsis.
        """

    @property
    @abc.abstractmethod
    def blocked_axes(self) -> tuple[int, ...]:
        """The axes that cannot be cut at every position, counted from the front."""

    @property
    @abc.abstractmethod
    def whole_axes(self) -> int | None:
        """The number of axes at the end that [`gather`][] does not index, or None if
        lookups are not supported."""

    @property
    def groups(self) -> dict[str, list[int]]:
        """The axes that the fields in `roles` hold, counted from the front."""
        ndim = self.ndim
        return {name: [a + ndim for a in getattr(self, name)] for name in self.roles}

    def move(self, operation: Operation) -> Any:
        """Apply a structural operation to every part."""
        groups = self.groups
        roles: Any = {name: (role, groups[name]) for name, role in self.roles.items()}
        moved = operation.regroup(roles)
        if moved is NotImplemented:
            return NotImplemented
        # Parts of all but "whole" axes are stored in the order of the logical axes.
        order = {
            n: a if self.roles[n] == "whole" else sorted(a) for n, a in moved.items()
        }
        ndim = operation.ndim
        before = self.axes_of_parts(self.ndim, groups)
        after = self.axes_of_parts(ndim, order)
        parts = {}
        for name, axes in before.items():
            part = getattr(self, name)
            # With other axes than the array, an array in parts is any other pytree.
            if isinstance(part, ArrayInParts) and axes == tuple(range(self.ndim)):
                part = part.move(operation)
            elif isinstance(part, ArrayInParts) and ... not in axes:
                if any(len(moved[n]) != len(groups[n]) for n in groups):
                    return NotImplemented  # Its fields hold these axes.
                part = part.move_within(operation, axes, after[name])
            elif part is not None:
                part = operation.on_part(part, axes, after[name])
            if part is NotImplemented:
                return NotImplemented
            parts[name] = part
        static = {n: tuple(axis - ndim for axis in axes) for n, axes in order.items()}
        return self.replace(**parts, **static)

    def move_within(self, operation: Operation, axes: Axes, new: Axes) -> Any:
        """Move an array that has some of the axes of a larger array. Its last axes,
        which the fields in `roles` hold, stay last."""
        before, after = self._parts_within(axes), self._parts_within(new)
        parts = {}
        for name in before:
            part = getattr(self, name)
            if part is not None:
                part = operation.on_part(part, before[name], after[name])
            if part is NotImplemented:
                return NotImplemented
            parts[name] = part
        return self.replace(**parts)

    def _parts_within(self, axes: Axes) -> dict[str, Axes]:
        """Return the axes of each part, as entries of `axes`."""
        n = len(axes)
        groups = {name: [i + n for i in getattr(self, name)] for name in self.roles}
        own = self.axes_of_parts(n, groups)
        return {name: tuple(axes[i] for i in places) for name, places in own.items()}

    def permute(self, permutation: Sequence[int]) -> Any:
        """As `lax.transpose`."""
        return self.move(Permute(self.shape, tuple(permutation)))

    def with_shape(self, shape: Sequence[int]) -> Any:
        """As `lax.reshape`."""
        return self.move(Reshape(self.shape, tuple(shape)))

    def broadcast_in_dim(self, shape: Sequence[int], dimensions: Sequence[int]) -> Any:
        """As `lax.broadcast_in_dim`."""
        return self.move(Broadcast(self.shape, tuple(shape), tuple(dimensions)))

    def slice(
        self,
        start: Sequence[int],
        limit: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> Any:
        """As `lax.slice`."""
        strides = tuple(strides or (1,) * self.ndim)
        return self.move(Slice(self.shape, tuple(start), tuple(limit), strides))

    def dynamic_slice(self, start: Sequence[Any], sizes: Sequence[int]) -> Any:
        """As `lax.dynamic_slice_p`: starts out of bounds are clamped, and negative
        starts are out of bounds. Arrays among the starts have one dtype."""
        dtype = jnp.result_type(*start) if len(start) else None
        starts = tuple(jnp.asarray(i, dtype) for i in start)
        return self.move(DynamicSlice(self.shape, starts, tuple(sizes)))

    def reverse(self, dimensions: Sequence[int]) -> Any:
        """As `lax.rev`."""
        return self.move(Reverse(self.shape, tuple(dimensions)))

    def drop_axes(self, dimensions: Sequence[int]) -> Any:
        """As `lax.squeeze`, of axes that are not blocked."""
        return self.move(Squeeze(self.shape, tuple(dimensions)))

    def gather(
        self, fn: Callable[[Array, Any], Array], ndim: int, fill: Any = None
    ) -> Any:
        """Look up along all axes except the last [`whole_axes`][].

        **Arguments:**

        - `fn`: `fn(x, fill)` looks up in an array whose whole axes are flattened into
            its last. Where it reads out of bounds it returns `fill`.
        - `ndim`: the number of axes of the result.
        - `fill`: the value out of bounds: 0, NaN, or None for any value.
        """
        count = self.ndim - (self.whole_axes or 0)
        new_count = ndim - (self.whole_axes or 0)
        return self.move(Gather(self.shape, fn, fill, count, new_count))

    def rows_last(self) -> tuple[Any, tuple[int, ...]]:
        """Return this array with the axes that [`gather`][] does not index as its last,
        and the permutation. All other axes keep their order."""
        if self.whole_axes is not None:
            return self, tuple(range(self.ndim))
        blocked = self.blocked_axes
        order = (*other_axes(self.ndim, blocked), *blocked)
        return self.permute(order), order

    @property
    def is_scannable(self) -> bool:
        """True if the first axis of every part is the first axis of the array, so that
        a loop over the parts is a loop over the array."""
        for name, axes in self.axes_of_parts(self.ndim, self.groups).items():
            part = getattr(self, name)
            if isinstance(part, ArrayInParts) and not part.is_scannable:
                return False
            if part is not None and axes[:1] != (0,):
                return False
        return True

    def concatenate(self, others: Sequence[Any], dimension: int) -> Any:
        """As `lax.concatenate`: append arrays of the same structure to this one."""
        groups = self.groups
        if any(
            dimension in groups[n] for n, role in self.roles.items() if role != "free"
        ):
            return NotImplemented
        parts = {}
        for name, axes in self.axes_of_parts(self.ndim, groups).items():
            first, *rest = (getattr(x, name) for x in (self, *others))
            if dimension not in axes:
                return NotImplemented  # The parts of each array would need their own.
            place = axes.index(dimension)
            if isinstance(first, ArrayInParts) and ... not in axes:
                part = first.concatenate(rest, place)
            else:
                join = lambda *arrays, place=place: lax.concatenate(arrays, place)
                part = jax.tree.map(join, first, *rest)
            if part is NotImplemented:
                return NotImplemented
            parts[name] = part
        return self.replace(**parts)
