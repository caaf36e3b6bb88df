"""`ImplicitArray`: the interface of an array that is stored in parts.

The parts are a pytree, for example codes and scales, or a weight and its adapter.
Operators, indexing, rules and control flow use this interface and never the parts.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TYPE_CHECKING, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Shaped

from ._axes import (
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
from ._materialise import materialise


class ImplicitArray(eqx.Module):
    """An array in parts.

    A subclass declares which logical axes each part has, in [`axes_of_parts`][], and
    which of its static fields hold axes, in `roles`. All structural operations follow
    from that. They are exact, never decode, and return an implicit array of the same
    class, or `NotImplemented` if that is not possible.
    """

    # The static fields that hold axes, counted from the end, and the role of each.
    roles: ClassVar[Mapping[str, Role]] = {}

    if TYPE_CHECKING:
        dtype: ClassVar[Any]  # A field or a property.

    #
    # The array that the parts stand for
    #

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that the parts stand for, derived from the parts."""

    @property
    @abc.abstractmethod
    def is_whole(self) -> bool:
        """Whether no part is missing. `eqx.partition` removes parts, for example."""

    @abc.abstractmethod
    def dequantize(self) -> Float[Array, "..."]:
        """Return the array that the parts stand for, in floating point."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all parts."""
        return sum(
            math.prod(part.shape) * part.dtype.itemsize
            for part in jax.tree.leaves(self)
        )

    def check_whole(self) -> None:
        """Raise an error if a part is missing, as in a gradient or in a result of
        `eqx.partition`."""
        if not self.is_whole:
            raise TypeError(
                f"{self!r} lacks some of its parts and cannot be used. If "
                "`eqx.partition` removed them, call `eqx.combine` first."
            )

    def replace(self, **fields):
        names = [field.name for field in dataclasses.fields(self)]
        return type(self)(**{n: fields.get(n, getattr(self, n)) for n in names})

    #
    # Structure
    #

    @abc.abstractmethod
    def axes_of_parts(self, ndim: int, groups: Mapping[str, Sequence[int]]) -> Any:
        """Return a dictionary with the axes of each part, by the name of its field.

        `ndim` is the number of logical axes. `groups` has the axes that the fields in
        `roles` hold, counted from the front. An implicit array among the parts must
        have all logical axes.
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
            if isinstance(part, ImplicitArray):
                part = part.move(operation)
            elif part is not None:
                part = operation.on_part(part, axes, after[name])
            if part is NotImplemented:
                return NotImplemented
            parts[name] = part
        static = {n: tuple(axis - ndim for axis in axes) for n, axes in order.items()}
        return self.replace(**parts, **static)

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
            if isinstance(first, ImplicitArray):
                part = first.concatenate(rest, dimension)
            else:
                place = axes.index(dimension)
                join = lambda *arrays, place=place: lax.concatenate(arrays, place)
                part = jax.tree.map(join, first, *rest)
            if part is NotImplemented:
                return NotImplemented
            parts[name] = part
        return self.replace(**parts)

    @abc.abstractmethod
    def with_dtype(self, dtype) -> Any:
        """Return the same parts, standing for an array of another floating-point
        dtype."""

    @abc.abstractmethod
    def scale_parts(self, factor: Shaped[Array, "..."], fn: Callable) -> Any:
        """Implement [`scaled`][] for a factor with as many axes as the array. Each axis
        of the factor has one element, or the size of that axis of the array."""

    def power(self, exponent: int) -> Any:
        """As `lax.integer_pow`."""
        return self if exponent == 1 else NotImplemented

    def put(
        self, rows: Shaped[Array, "..."], fn: Callable[[Array, Array], Array]
    ) -> Any:
        """Replace whole rows. `rows` has the blocked axes, counted from the end. It is
        split into the same parts, and `fn(part, new)` puts each of them in place."""
        return NotImplemented

    def split_specs(self, spec: PartitionSpec, mesh) -> Any:
        """Return a tree of the same structure with a `PartitionSpec` for each part,
        which split the parts over the mesh as `spec` splits the array."""
        entries = [*spec, *[None] * (self.ndim - len(spec))]
        entry = lambda axis: entries[axis] if isinstance(axis, int) else None
        axes = self.axes_of_parts(self.ndim, self.groups)
        specs = []
        for field in dataclasses.fields(self):
            part = getattr(self, field.name)
            if isinstance(part, ImplicitArray):
                part = part.split_specs(spec, mesh)
                if part is NotImplemented:
                    return NotImplemented
                specs += jax.tree.leaves(part)
            elif part is not None and field.name in axes:
                specs.append(PartitionSpec(*map(entry, axes[field.name])))
        return jax.tree.unflatten(jax.tree.structure(self), specs)

    #
    # Products
    #

    @property
    @abc.abstractmethod
    def rounds_activations(self) -> bool:
        """Whether products round the activation to int8. Where [`contract`][] cannot
        serve, the product with the decoded array also rounds it."""

    @abc.abstractmethod
    def contract(
        self,
        x: Shaped[Array, "..."],
        over: Sequence[tuple[int, int]],
        batch: Sequence[tuple[int, int]] = (),
        *,
        precision: Any = None,
        out_dtype=None,
        out_sharding: PartitionSpec | None = None,
    ) -> Any:
        """Contract this array with `x`.

        **Arguments:**

        - `over`: pairs of contracted axes, of this array and of `x`.
        - `batch`: pairs of batch axes.
        - `precision`, `out_dtype`: as in `lax.dot_general`.
        - `out_sharding`: how the result is split on a mesh with explicit axes.

        **Returns:**

        An array with these axes: batch, free axes of `x`, free axes of this array.
        """

    #
    # Methods of arrays, in terms of the above
    #

    def transpose(self, *axes):
        """As `jnp.transpose`: exact."""
        if len(axes) == 1 and isinstance(axes[0], list | tuple):
            (axes,) = axes
        if not axes or axes == (None,):
            axes = tuple(reversed(range(self.ndim)))
        permutation = [_canonical_axis(axis, self.ndim) for axis in axes]
        if sorted(permutation) != list(range(self.ndim)):
            raise ValueError(
                f"transpose: axes must be a permutation of {tuple(range(self.ndim))}, "
                f"got {tuple(axes)}."
            )
        return self.permute(permutation)

    @property
    def T(self):
        return self.transpose()

    @property
    def mT(self):
        if self.ndim < 2:
            raise ValueError(
                f"mT: the array must have two or more axes, got shape {self.shape}."
            )
        return self.swapaxes(-1, -2)

    def broadcast_to(self, shape: Sequence[int]):
        """As `jnp.broadcast_to`."""
        if tuple(shape) == self.shape:
            return self
        offset = len(shape) - self.ndim
        return self.broadcast_in_dim(shape, range(offset, len(shape)))

    def squeeze(self, dimensions: Sequence[int]):
        """As `lax.squeeze`. A result with fewer than two axes is an activation rather
        than a weight, and is returned in floating point."""
        blocked = any(axis in self.blocked_axes for axis in dimensions)
        if self.ndim - len(dimensions) < 2 or blocked:
            return jnp.squeeze(self.dequantize(), tuple(dimensions))
        return self.drop_axes(dimensions)

    def scaled(self, factor: Shaped[Array, "..."], fn: Callable = lax.mul) -> Any:
        """Return `fn(array, factor)`, a product or a quotient. The factor has the dtype
        of the array, broadcasts to its shape, and is constant along the blocked axes.
        """
        if factor.ndim > self.ndim:
            return NotImplemented
        factor = factor.reshape((1,) * (self.ndim - factor.ndim) + factor.shape)
        sizes = zip(factor.shape, self.shape, strict=True)
        if any(n not in (1, size) for n, size in sizes):
            return NotImplemented
        return self.scale_parts(factor, fn)

    def swapaxes(self, axis1: int, axis2: int):
        """As `jnp.swapaxes`: exact."""
        axes = list(range(self.ndim))
        i, j = _canonical_axis(axis1, self.ndim), _canonical_axis(axis2, self.ndim)
        axes[i], axes[j] = axes[j], axes[i]
        return self.permute(axes)

    def flatten(self):
        """As `jnp.ravel`, with the warning of [`reshape`][]."""
        return self.reshape(-1)

    ravel = flatten

    def copy(self):
        """Copy every part."""
        return jax.tree.map(jnp.copy, self)

    def block_until_ready(self):
        """Wait until the parts are computed."""
        return jax.block_until_ready(self)

    def reshape(self, *shape):
        """As `jnp.reshape`: exact if the blocked axes stay whole. Otherwise, decode the
        array and warn."""
        if len(shape) == 1 and isinstance(shape[0], list | tuple):
            (shape,) = shape
        known = math.prod(n for n in shape if n != -1)
        shape = tuple(self.size // max(known, 1) if n == -1 else n for n in shape)
        if math.prod(shape) != self.size:
            raise ValueError(f"reshape: cannot reshape {self.shape} into {shape}.")
        out = self.with_shape(shape)
        if out is NotImplemented:
            return materialise(self, "reshape", "warn").reshape(shape)
        return out

    def astype(self, dtype):
        """Return the same parts, standing for an array of another floating-point dtype.
        For any other dtype, decode the array and warn."""
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            return materialise(self, f"astype({dtype})", "warn").astype(dtype)
        return self.with_dtype(dtype)


def _canonical_axis(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} is out of range for an array of {ndim} axes.")
    return axis % ndim


def is_implicit(x: Any) -> TypeGuard[ImplicitArray]:
    """Return whether `x` is an implicit array with all of its parts. Use it as
    `is_leaf`."""
    return isinstance(x, ImplicitArray) and x.is_whole
