"""Structural operations on arrays that have some of the axes of a logical array.

An implicit array declares the logical axes of each of its parts. One operation then
moves every part, along the logical axes that the part has.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from ..formats import gather_scales, ShortScales
from ..partition import aligned


# The axes of a part. An integer is a logical axis, counted from the front. Any other
# label is an axis of storage, and an ellipsis any number of these at the end.
Axes: TypeAlias = tuple[Any, ...]

# What may happen to a group of logical axes:
# - "whole": they are neither cut nor resized, and keep their order of storage;
# - "kept": they may be cut, but are neither resized nor reversed;
# - "free": anything, except a reshape that merges them with axes of another group.
Role: TypeAlias = Literal["whole", "kept", "free"]


@dataclasses.dataclass(frozen=True)
class Operation(abc.ABC):
    """A structural operation on an array of shape `old`."""

    old: tuple[int, ...]

    @property
    @abc.abstractmethod
    def ndim(self) -> int:
        """The number of logical axes after the operation."""

    def target(self, axis: int) -> int | None:
        """Return the new place of a logical axis, or None if the axis goes away."""
        return axis

    def source(self, axis: int) -> int | None:
        """Return the old place of a logical axis, or None if the axis is new."""
        return next((i for i in range(len(self.old)) if self.target(i) == axis), None)

    def allows(self, axis: int, role: Role) -> bool:
        """Return whether the operation respects the role of a logical axis."""
        return True

    def regroup(self, groups: Mapping[str, tuple[Role, Sequence[int]]]) -> Any:
        """Return the new axes of each group, or `NotImplemented` if the operation does
        not respect the role of a group."""
        out = {}
        for name, (role, axes) in groups.items():
            if not all(self.allows(axis, role) for axis in axes):
                return NotImplemented
            moved = [self.target(axis) for axis in axes]
            out[name] = [axis for axis in moved if axis is not None]
        return out

    @abc.abstractmethod
    def on_array(self, x: Shaped[Array, "..."], axes: Axes, new: Axes) -> Any:
        """Apply the operation to an array with these axes, which has the axes `new`
        afterwards. Return `NotImplemented` if that is not possible."""

    def on_part(self, part: Any, axes: Axes, new: Axes) -> Any:
        """Apply the operation to a pytree of arrays with these axes."""
        return jax.tree.map(
            lambda x: self.on_array(x, *_expanded(x.ndim, axes, new)), part
        )

    def places(self, axes: Axes, new: Axes) -> list[int | None]:
        """Return the position in `axes` of each axis in `new`, before the operation.
        None is a new axis."""
        sources = [self._source(axis) for axis in new]
        return [axes.index(i) if i in axes else None for i in sources]

    def _source(self, axis: Any) -> Any:
        return self.source(axis) if isinstance(axis, int) else axis


def _expanded(ndim: int, axes: Axes, new: Axes) -> tuple[Axes, Axes]:
    """Replace an ellipsis by as many storage axes as an array of `ndim` axes has."""
    if ... not in axes:
        return axes, new
    storage = [f"storage {i}" for i in range(ndim - len(axes) + 1)]
    return (*axes[:-1], *storage), (*new[:-1], *storage)


def _sizes(x: Any, axes: Axes, logical: Sequence[Any], new: Axes | None = None) -> list:
    """Return an entry for each axis in `new`: from `logical`, or the size of the
    storage axis of `x`."""
    size = lambda axis: x.shape[axes.index(axis)]
    new = axes if new is None else new
    return [logical[i] if isinstance(i, int) else size(i) for i in new]


def _entries(axes: Axes, logical: Sequence[Any], storage: Any) -> list:
    return [logical[i] if isinstance(i, int) else storage for i in axes]


@dataclasses.dataclass(frozen=True)
class Permute(Operation):
    """`lax.transpose`."""

    permutation: tuple[int, ...]

    @property
    def ndim(self):
        return len(self.old)

    def target(self, axis):
        return self.permutation.index(axis)

    def on_array(self, x, axes, new):
        order = [axes.index(self._source(axis)) for axis in new]
        # Often only an axis moves that the part does not have.
        return x if order == sorted(order) else jnp.transpose(x, order)


@dataclasses.dataclass(frozen=True)
class Reshape(Operation):
    """`lax.reshape`, if axes of different groups are not merged."""

    shape: tuple[int, ...]

    @property
    def ndim(self):
        return len(self.shape)

    def source(self, axis):
        for before, after in aligned(self.old, self.shape):
            long = [i for i in after if self.shape[i] > 1]
            if long[:1] == [axis]:
                return next((i for i in before if self.old[i] > 1), None)
        return None

    def regroup(self, groups):
        rigid = {
            axis for role, axes in groups.values() if role != "free" for axis in axes
        }
        places = self._places(sorted(rigid))
        if places is None:
            return NotImplemented
        out = {}
        for name, (role, axes) in groups.items():
            moved = (
                [places[axis] for axis in axes] if role != "free" else self._runs(axes)
            )
            if moved is None:
                return NotImplemented
            out[name] = moved
        lead = [n for i, n in enumerate(self.shape) if i not in places.values()]
        kept = [n for i, n in enumerate(self.old) if i not in places]
        # The shape of an empty array does not tell how many rows its parts have.
        fits = 0 not in self.old or math.prod(lead) == math.prod(kept)
        return out if fits else NotImplemented

    def _places(self, axes: Sequence[int]) -> dict[int, int] | None:
        """Find each axis in the new shape: an axis of equal size, with equally many
        elements before it. Among several axes of one element, choose the last, because
        new axes are split off at the front."""
        places: dict[int, int] = {}
        stop = len(self.shape)
        for axis in reversed(axes):
            before = math.prod(self.old[:axis])
            for new in reversed(range(stop)):
                same = self.shape[new] == self.old[axis]
                if same and math.prod(self.shape[:new]) == before:
                    places[axis] = stop = new
                    break
            else:
                return None
        return places

    def _runs(self, axes: Sequence[int]) -> list[int] | None:
        """Return the new axes of a free group.

        They are the axes of every run with the same elements before and after. Axes of
        one element belong to any group.
        """
        if 0 in self.old:
            return None
        out = []
        for before, after in aligned(self.old, self.shape):
            long = {axis for axis in before if self.old[axis] > 1}
            if long and long <= set(axes):
                out += after
            elif long & set(axes):
                return None
        return out

    def on_array(self, x, axes, new):
        return x.reshape(_sizes(x, axes, self.shape, new))


@dataclasses.dataclass(frozen=True)
class Broadcast(Operation):
    """`lax.broadcast_in_dim`."""

    shape: tuple[int, ...]
    dimensions: tuple[int, ...]

    @property
    def ndim(self):
        return len(self.shape)

    def target(self, axis):
        return self.dimensions[axis]

    def allows(self, axis, role):
        return role == "free" or self.shape[self.dimensions[axis]] == self.old[axis]

    def on_array(self, x, axes, new):
        target = lambda axis: self.target(axis) if isinstance(axis, int) else axis
        onto = [new.index(target(axis)) for axis in axes]
        return lax.broadcast_in_dim(x, _sizes(x, axes, self.shape, new), onto)


@dataclasses.dataclass(frozen=True)
class Cut(Operation):
    """An operation that keeps all axes, and takes some elements of each."""

    @property
    def ndim(self):
        return len(self.old)

    @abc.abstractmethod
    def cuts(self, axis: int) -> bool:
        """Return whether some elements of an axis are left out."""

    def allows(self, axis, role):
        return role != "whole" or not self.cuts(axis)


@dataclasses.dataclass(frozen=True)
class Slice(Cut):
    """`lax.slice`."""

    start: tuple[int, ...]
    limit: tuple[int, ...]
    strides: tuple[int, ...]

    def cuts(self, axis):
        bounds = self.start[axis], self.limit[axis], self.strides[axis]
        return bounds != (0, self.old[axis], 1)

    def on_array(self, x, axes, new):
        if not any(self.cuts(axis) for axis in axes if isinstance(axis, int)):
            return x
        limit = _sizes(x, axes, self.limit)
        start, strides = _entries(axes, self.start, 0), _entries(axes, self.strides, 1)
        return lax.slice(x, start, limit, strides)

    def after(self, axis: int) -> "Slice":
        """Return the rest of the slice, after one axis has been sliced."""
        size = self.limit[axis] - self.start[axis]
        fields = {"old": size, "start": 0, "limit": size}
        put = lambda values, n: (*values[:axis], n, *values[axis + 1 :])
        new = {name: put(getattr(self, name), n) for name, n in fields.items()}
        return dataclasses.replace(self, **new)


@dataclasses.dataclass(frozen=True)
class DynamicSlice(Cut):
    """`lax.dynamic_slice_p`, in which a negative start is out of bounds, and clamped.
    The entries of `start` have one dtype."""

    start: tuple[Any, ...]
    sizes: tuple[int, ...]

    def cuts(self, axis):
        return self.sizes[axis] != self.old[axis]

    def on_array(self, x, axes, new):
        if not any(isinstance(axis, int) for axis in axes):
            return x
        zero = jnp.zeros((), self.start[0].dtype)
        start = _entries(axes, self.start, zero)
        sizes = _sizes(x, axes, self.sizes)
        return lax.dynamic_slice(x, start, sizes, allow_negative_indices=False)


@dataclasses.dataclass(frozen=True)
class Reverse(Operation):
    """`lax.rev`."""

    dimensions: tuple[int, ...]

    @property
    def ndim(self):
        return len(self.old)

    def allows(self, axis, role):
        return role == "free" or axis not in self.dimensions

    def on_array(self, x, axes, new):
        return lax.rev(x, [axes.index(i) for i in self.dimensions if i in axes])


@dataclasses.dataclass(frozen=True)
class Squeeze(Operation):
    """`lax.squeeze`."""

    dimensions: tuple[int, ...]

    @property
    def ndim(self):
        return len(self.old) - len(self.dimensions)

    def target(self, axis):
        if axis in self.dimensions:
            return None
        return axis - sum(dropped < axis for dropped in self.dimensions)

    def allows(self, axis, role):
        return role != "whole" or axis not in self.dimensions

    def on_array(self, x, axes, new):
        return lax.squeeze(x, [axes.index(i) for i in self.dimensions if i in axes])


@dataclasses.dataclass(frozen=True)
class Gather(Operation):
    """A lookup along the first `count` axes, which `new_count` axes replace.

    `fn(x, fill)` looks up in an array whose other axes are flattened into its last.
    Where it reads out of bounds, it returns `fill`: 0, NaN, or None for any value.
    """

    fn: Callable[[Array, Any], Array]
    fill: Any
    count: int
    new_count: int

    @property
    def ndim(self):
        return len(self.old) - self.count + self.new_count

    def target(self, axis):
        # Any row may be looked up: no new axis stems from one of the first axes.
        return None if axis < self.count else axis - self.count + self.new_count

    def regroup(self, groups):
        out = super().regroup(groups)
        for name, (_, axes) in groups.items():
            looked_up = [axis for axis in axes if axis < self.count]
            if looked_up and sorted(axes) != list(range(self.count)):
                return NotImplemented
            if looked_up:
                out[name] = list(range(self.new_count))
        return out

    def on_part(self, part, axes, new):
        if not isinstance(part, ShortScales):
            return super().on_part(part, axes, new)
        return gather_scales(self._look_up, part, self.fill)

    def on_array(self, x, axes, new):
        looked_up = [i for i in axes if isinstance(i, int) and i < self.count]
        if not looked_up:
            return x
        if list(axes[: self.count]) != list(range(self.count)):
            return NotImplemented
        # Codes are arbitrary where scales are filled.
        fill = self.fill if jnp.issubdtype(x.dtype, jnp.floating) else None
        return self._look_up(x, fill)

    def _look_up(self, x, fill: Any):
        kept = x.shape[self.count :]
        out = self.fn(x.reshape(*x.shape[: self.count], math.prod(kept)), fill)
        return out.reshape(*out.shape[:-1], *kept)
