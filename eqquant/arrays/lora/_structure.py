"""The fields of a weight with an adapter, and its structural operations, which are
exact."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Key, Shaped

from ...primitives import aligned
from .. import _plain as plain
from .._implicit import ImplicitArray, is_implicit
from .._operators import ArrayOperators


class AbstractLoraArray(ArrayOperators):
    """The fields of a [`eqquant.arrays.LoraArray`][], and what moves them about."""

    base: Any
    a: Float[Array, "..."]
    b: Float[Array, "..."]
    key: Key[Array, "*lead"] | None
    scale: float = eqx.field(static=True)
    dropout: float = eqx.field(static=True)
    in_axes: tuple[int, ...] = eqx.field(static=True)
    out_axes: tuple[int, ...] = eqx.field(static=True)

    #
    # What it stands for
    #

    @property
    def is_whole(self) -> bool:
        if isinstance(self.base, ImplicitArray) and not self.base.is_whole:
            return False
        return all(hasattr(x, "shape") for x in (self.base, self.a, self.b))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape)

    @property
    def dtype(self):
        return self.base.dtype

    @property
    def rank(self) -> int:
        return self.b.shape[-1]

    @property
    def lead_axes(self) -> tuple[int, ...]:
        """The axes that the base, `a` and `b` share."""
        return _lead_axes(self.ndim, self.in_axes, self.out_axes)

    #
    # Structure. Each part has some of the axes of the weight; `_on_parts` is the whole
    # mechanism: what is done to the weight is done to each part, on those that it has.
    #

    def replace(self, **fields):
        names = [field.name for field in dataclasses.fields(self)]
        return type(self)(**{n: fields.get(n, getattr(self, n)) for n in names})

    @property
    def axes_of_parts(self) -> dict[str, tuple[int | None, ...]]:
        """Which axis of the weight each of a part is; None for that of the rank."""
        axes = _axes_of_parts(self.ndim, self.in_axes, self.out_axes)
        if self.key is None:
            del axes["key"]
        return axes

    def _on_parts(
        self,
        base: Any,
        fn: Callable,
        in_axes: Sequence[int] | None = None,
        out_axes: Sequence[int] | None = None,
    ):
        """A new base, and `fn(part, axes, new_axes)` of each other part: which axes of
        the weight it has (None for that of the rank), and which it should have then,
        when the in- and out-axes are as given."""
        if base is NotImplemented:
            return NotImplemented
        ins = self.in_axes if in_axes is None else tuple(sorted(in_axes))
        outs = self.out_axes if out_axes is None else tuple(sorted(out_axes))
        new = _axes_of_parts(len(base.shape), ins, outs)
        parts = {
            name: fn(getattr(self, name), axes, new[name])
            for name, axes in self.axes_of_parts.items()
        }
        return self.replace(base=base, in_axes=ins, out_axes=outs, **parts)

    def _move(self, to: Callable[[int], int], ndim: int) -> tuple[list, list]:
        """In- and out-axes, after each has got another place."""
        ins, outs = (
            [to(axis + self.ndim) - ndim for axis in axes]
            for axes in (self.in_axes, self.out_axes)
        )
        return ins, outs

    def permute(self, permutation: Sequence[int]) -> "AbstractLoraArray":
        def permute(part, axes, new):
            return part.transpose(
                [axes.index(None if i is None else permutation[i]) for i in new]
            )

        moved = self._move(list(permutation).index, self.ndim)
        base = plain.apply("permute", self.base, permutation)
        return self._on_parts(base, permute, *moved)

    def with_dtype(self, dtype) -> "AbstractLoraArray":
        return self.replace(base=self.base.astype(dtype))

    def with_shape(self, shape: Sequence[int]) -> Any:
        """Where no axes of different kinds (leading, in, out) are merged."""
        shape, old = tuple(shape), self.shape
        if 0 in old:
            return NotImplemented
        ins, outs = (
            {axis + self.ndim for axis in axes}
            for axes in (self.in_axes, self.out_axes)
        )
        new_ins, new_outs = [], []
        for before, after in aligned(old, shape):
            # An axis of one element is of any kind.
            many = {axis for axis in before if old[axis] > 1}
            if many and many <= ins:
                new_ins += after
            elif many and many <= outs:
                new_outs += after
            elif many & (ins | outs):
                return NotImplemented

        def reshape(part, axes, new):
            return part.reshape([self.rank if i is None else shape[i] for i in new])

        from_end = lambda axes: [axis - len(shape) for axis in axes]
        base = plain.apply("with_shape", self.base, shape)
        return self._on_parts(base, reshape, from_end(new_ins), from_end(new_outs))

    def broadcast_in_dim(self, shape: Sequence[int], dimensions: Sequence[int]) -> Any:
        def broadcast(part, axes, new):
            sizes = [self.rank if i is None else shape[i] for i in new]
            onto = [new.index(None if i is None else dimensions[i]) for i in axes]
            return lax.broadcast_in_dim(part, sizes, onto)

        moved = self._move(lambda axis: dimensions[axis], len(shape))
        base = plain.apply("broadcast_in_dim", self.base, shape, dimensions)
        return self._on_parts(base, broadcast, *moved)

    def slice(
        self,
        start: Sequence[int],
        limit: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> Any:
        strides = tuple(strides or (1,) * self.ndim)

        def cut(part, axes, _):
            return lax.slice(
                part,
                [0 if i is None else start[i] for i in axes],
                [self.rank if i is None else limit[i] for i in axes],
                [1 if i is None else strides[i] for i in axes],
            )

        return self._on_parts(
            plain.apply("slice", self.base, start, limit, strides), cut
        )

    def dynamic_slice(self, start: Sequence[Any], sizes: Sequence[int]) -> Any:
        first = [jnp.asarray(i) for i in start]
        dtype = jnp.result_type(*first)
        first = [i.astype(dtype) for i in first]

        def cut(part, axes, _):
            begin = [jnp.zeros((), dtype) if i is None else first[i] for i in axes]
            size = [self.rank if i is None else sizes[i] for i in axes]
            return lax.dynamic_slice(part, begin, size) if axes else part

        return self._on_parts(
            plain.apply("dynamic_slice", self.base, first, sizes), cut
        )

    def reverse(self, dimensions: Sequence[int]) -> Any:
        def reverse(part, axes, _):
            return lax.rev(part, [axes.index(i) for i in dimensions if i in axes])

        return self._on_parts(plain.apply("reverse", self.base, dimensions), reverse)

    def drop_axes(self, dimensions: Sequence[int]) -> "AbstractLoraArray":
        left = [axis for axis in range(self.ndim) if axis not in dimensions]
        ins, outs = (
            [
                left.index(i + self.ndim) - len(left)
                for i in axes
                if i + self.ndim in left
            ]
            for axes in (self.in_axes, self.out_axes)
        )

        def drop(part, axes, _):
            return lax.squeeze(part, [axes.index(i) for i in dimensions if i in axes])

        base = plain.apply("drop_axes", self.base, dimensions)
        return self._on_parts(base, drop, ins, outs)

    @property
    def blocked_axes(self) -> tuple[int, ...]:
        return self.base.blocked_axes if is_implicit(self.base) else ()

    @property
    def whole_axes(self) -> int | None:
        # Out of a matrix rows, which only `b` has; out of a stack whole matrices.
        whole = self.in_axes
        if self.lead_axes:
            whole = (*self.in_axes, *self.out_axes)
        n = len(whole)
        of_base: Any = self.base.whole_axes if is_implicit(self.base) else 0
        if of_base is None or of_base > n:
            return None
        return n if sorted(whole) == list(range(-n, 0)) else None

    def gather(self, fn: Callable[[Array, Any], Array], fill: Any = None) -> Any:
        n, base = self.whole_axes, self.base
        assert n is not None
        none = None if fill is None else 0  # One part that is not a number is enough.
        if is_implicit(base):
            more = 1 + n - (base.whole_axes or 0)
            take = lambda part, fill: plain.gather(fn, part, more, fill)
            base = base.gather(take, fill)
        else:
            base = plain.gather(fn, base, n, fill)
        if self.lead_axes:
            lead = len(self.lead_axes)
            take = lambda part, axes, _: plain.gather(fn, part, len(axes) - lead, none)
            return self._on_parts(base, take)
        # Those that rows are taken from, and what they become, are the out-axes.
        out_axes = tuple(range(-base.ndim, -n))
        return self.replace(base=base, b=fn(self.b, none), out_axes=out_axes)

    def concatenate(self, others: Sequence["AbstractLoraArray"], dimension: int):
        if dimension not in self.lead_axes:
            return NotImplemented
        bases = [q.base for q in others]
        base = plain.apply("concatenate", self.base, bases, dimension)
        if base is NotImplemented:
            return NotImplemented
        lead = self.lead_axes.index(dimension)
        parts = {
            name: lax.concatenate([getattr(q, name) for q in (self, *others)], lead)
            for name in self.axes_of_parts
        }
        return self.replace(base=base, **parts)

    def scale_parts(self, factor: Shaped[Array, "..."], fn: Callable) -> Any:
        """The base, and that part of the adapter which has the axes of the factor."""
        varies = {axis for axis, n in enumerate(factor.shape) if n > 1}
        for name in ("b", "a"):
            axes = self.axes_of_parts[name]
            if varies <= set(axes):
                break
        else:
            return NotImplemented
        base = plain.apply("scaled", self.base, factor, fn)
        if base is NotImplemented:
            return NotImplemented
        part = getattr(self, name)
        kept = [axis for axis in axes if axis is not None]
        others = [axis for axis in range(self.ndim) if axis not in kept]
        sizes = [1 if axis is None else factor.shape[axis] for axis in axes]
        factor = jnp.transpose(factor, (*kept, *others)).reshape(sizes)
        return self.replace(base=base, **{name: plain.scaled(part, factor, fn)})

    def split_specs(self, spec: PartitionSpec, mesh) -> Any:
        entries = [*spec, *[None] * (self.ndim - len(spec))]
        specs = [PartitionSpec(*entries)]
        if is_implicit(self.base):
            base = self.base.split_specs(spec, mesh)
            if base is NotImplemented:
                return NotImplemented
            specs = jax.tree.leaves(base)
        for axes in self.axes_of_parts.values():
            specs.append(PartitionSpec(*(i if i is None else entries[i] for i in axes)))
        return jax.tree.unflatten(jax.tree.structure(self), specs)


def _lead_axes(ndim: int, in_axes: Sequence[int], out_axes: Sequence[int]):
    others = {axis + ndim for axis in (*in_axes, *out_axes)}
    return tuple(axis for axis in range(ndim) if axis not in others)


def _axes_of_parts(
    ndim: int, in_axes: Sequence[int], out_axes: Sequence[int]
) -> dict[str, tuple[int | None, ...]]:
    lead = _lead_axes(ndim, in_axes, out_axes)
    ins, outs = (tuple(i + ndim for i in axes) for axes in (in_axes, out_axes))
    return {"a": (*lead, None, *ins), "b": (*lead, *outs, None), "key": lead}
