"""The fields of an array that observes, and its structural operations. Its sums have
the axes of the stack, too."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped

from .. import _plain as plain
from .._operators import ArrayOperators


class Observed(eqx.Module):
    """What is known of the inputs of a weight: sums over the rows that it multiplies.

    **Fields:**

    - `gram`: `(*lead, size, size)`: the sum of the outer products of the rows that each
        matrix has multiplied, `X^T X`. If rows of the weight were looked up: of the
        gradients with respect to those.
    - `rows`: `(*lead)`: how many rows.
    - `power`: `(*lead)`: the sum of the squared gradients with respect to the outputs.
    """

    gram: Float[Array, "*lead size size"]
    rows: Float[Array, "*lead"]
    power: Float[Array, "*lead"]

    @classmethod
    def nothing(cls, lead: Sequence[int], size: int, dtype) -> "Observed":
        zeros = lambda *shape: jnp.zeros((*lead, *shape), dtype)
        return cls(zeros(size, size), zeros(), zeros())


class AbstractObservedArray(ArrayOperators):
    """The fields of an `ObservedArray`, and its structural operations."""

    base: Float[Array, "..."]
    seen: Observed
    axes: tuple[int, ...] = eqx.field(static=True)
    lead: tuple[int, ...] = eqx.field(static=True)
    every_row: bool = eqx.field(static=True, default=False)
    looked_up: bool = eqx.field(static=True, default=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def dtype(self) -> np.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.dtype

    @property
    def is_whole(self) -> bool:
        return all(hasattr(x, "shape") for x in (self.base, self.seen.gram))

    @property
    def others(self) -> tuple[int, ...]:
        """The axes that are neither contracted nor of the stack."""
        known = {*self.axes, *self.lead}
        return tuple(axis for axis in range(-self.ndim, 0) if axis not in known)

    #
    # Structure
    #

    def _with(self, base, fn: Callable[[Array], Array] | None = None, **fields):
        """Another base, and `fn` of what has the axes of the stack."""
        seen = self.seen if fn is None else jax.tree.map(fn, self.seen)
        names = ("axes", "lead", "every_row", "looked_up")
        static = {name: fields.get(name, getattr(self, name)) for name in names}
        return type(self)(base, seen, **static)

    def _moved(self, to: Callable[[int], int], ndim: int) -> dict[str, Any]:
        move = lambda axes: tuple(to(axis + self.ndim) - ndim for axis in axes)
        return {"axes": move(self.axes), "lead": tuple(sorted(move(self.lead)))}

    def _of_stack(self, values: Sequence[Any], rest: Sequence[int]) -> list:
        return [*(values[axis + self.ndim] for axis in self.lead), *rest]

    @property
    def blocked_axes(self) -> tuple[int, ...]:
        return tuple(axis + self.ndim for axis in self.axes)

    @property
    def whole_axes(self) -> int | None:
        # Out of a stack whole matrices.
        whole = (*self.axes, *self.others) if self.lead else self.axes
        n = len(whole)
        return n if sorted(whole) == list(range(-n, 0)) else None

    def gather(self, fn: Callable[[Array, Any], Array], fill: Any = None) -> Any:
        n = self.whole_axes
        assert n is not None
        base = plain.gather(fn, self.base, n, fill)
        if not self.lead:
            return self._with(base, looked_up=True)
        none = None if fill is None else 0
        lead = tuple(range(-base.ndim, -n))

        def take(part):
            kept = part.ndim - len(self.lead)
            if kept:
                return plain.gather(fn, part, kept, none)
            return fn(part[..., None], none)[..., 0]

        return self._with(base, take, lead=lead)

    def permute(self, permutation: Sequence[int]) -> Any:
        moved = self._moved(list(permutation).index, self.ndim)
        was = [axis + self.ndim for axis in self.lead]
        order = [was.index(permutation[axis + self.ndim]) for axis in moved["lead"]]

        def permute(part):
            rest = range(len(order), part.ndim)
            return jnp.transpose(part, (*order, *rest))

        return self._with(lax.transpose(self.base, permutation), permute, **moved)

    def with_dtype(self, dtype) -> Any:
        return self._with(self.base.astype(dtype))

    def with_shape(self, shape: Sequence[int]) -> Any:
        """Where axes of one element come or go."""
        shape = tuple(shape)
        if [n for n in shape if n != 1] != [n for n in self.shape if n != 1]:
            return NotImplemented
        kept = {axis + self.ndim for axis in (*self.axes, *self.lead)}
        if any(self.shape[axis] == 1 for axis in kept):
            return self._with(self.base) if shape == self.shape else NotImplemented
        old = [i for i, n in enumerate(self.shape) if n != 1]
        new = [i for i, n in enumerate(shape) if n != 1]
        moved = self._moved(lambda axis: new[old.index(axis)], len(shape))
        return self._with(self.base.reshape(shape), **moved)

    def broadcast_in_dim(self, shape: Sequence[int], dimensions: Sequence[int]) -> Any:
        moved = self._moved(lambda axis: dimensions[axis], len(shape))
        if any(shape[axis] != self.shape[old] for axis, old in self._kept(moved)):
            return NotImplemented
        return self._with(lax.broadcast_in_dim(self.base, shape, dimensions), **moved)

    def _kept(self, moved: dict[str, Any]):
        new, old = (*moved["axes"], *moved["lead"]), (*self.axes, *self.lead)
        return zip(new, old, strict=True)

    def slice(
        self,
        start: Sequence[int],
        limit: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> Any:
        strides = tuple(strides or (1,) * self.ndim)
        cut = (tuple(start), tuple(limit), strides)
        for axis in self.blocked_axes:
            if [c[axis] for c in cut] != [0, self.shape[axis], 1]:
                return NotImplemented

        def slice_part(part):
            rest = part.shape[len(self.lead) :]
            return lax.slice(
                part,
                self._of_stack(start, [0] * len(rest)),
                self._of_stack(limit, rest),
                self._of_stack(strides, [1] * len(rest)),
            )

        base = lax.slice(self.base, *cut)
        return self._with(base, slice_part, looked_up=self._takes_rows(base.shape))

    def dynamic_slice(self, start: Sequence[Any], sizes: Sequence[int]) -> Any:
        if any(sizes[axis] != self.shape[axis] for axis in self.blocked_axes):
            return NotImplemented

        def slice_part(part):
            if not self.lead:
                return part
            rest = part.shape[len(self.lead) :]
            starts = self._of_stack(start, [0] * len(rest))
            return plain.apply(
                "dynamic_slice", part, starts, self._of_stack(sizes, rest)
            )

        base = plain.apply("dynamic_slice", self.base, start, sizes)
        return self._with(base, slice_part, looked_up=self._takes_rows(base.shape))

    def _takes_rows(self, shape: Sequence[int]) -> bool:
        return self.looked_up or any(
            shape[axis] != self.shape[axis] for axis in self.others
        )

    def reverse(self, dimensions: Sequence[int]) -> Any:
        kept = {axis + self.ndim for axis in (*self.axes, *self.lead)}
        if kept & set(dimensions):
            return NotImplemented
        return self._with(lax.rev(self.base, dimensions))

    def drop_axes(self, dimensions: Sequence[int]) -> Any:
        left = [axis for axis in range(self.ndim) if axis not in dimensions]
        dropped = [i for i, a in enumerate(self.lead) if a + self.ndim in dimensions]
        lead = tuple(a for a in self.lead if a + self.ndim not in dimensions)
        move = lambda axes: tuple(left.index(a + self.ndim) - len(left) for a in axes)
        return self._with(
            lax.squeeze(self.base, dimensions),
            lambda part: lax.squeeze(part, dropped),
            axes=move(self.axes),
            lead=move(lead),
        )

    def concatenate(self, others: Sequence[Any], dimension: int) -> Any:
        return NotImplemented

    def scale_parts(self, factor: Shaped[Array, "..."], fn: Callable) -> Any:
        return self._with(plain.scaled(self.base, factor, fn))

    def split_specs(self, spec, mesh) -> Any:
        return NotImplemented
