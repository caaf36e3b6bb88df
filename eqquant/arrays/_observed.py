"""The array that observes what it multiplies.

What it has seen is a gradient, with respect to parts that are zero and add nothing to
the value. So observing is pure, and any code that can be differentiated can be
observed: under `jit`, `vmap`, `scan` and `checkpoint`.
"""

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped

from .._jax import has_explicit_axes
from ..primitives import observe_rows, sums_of_rows
from . import _plain as plain
from ._operators import ArrayOperators


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


class ObservedArray(ArrayOperators):
    """A weight whose gradient says what it multiplies.

    Values and derivatives are those of `base`. The gradient with respect to `seen` is
    the sums of an [`Observed`][], whatever function is differentiated. Rows on which
    the function does not depend, such as padding, are left out.

    **Fields:**

    - `base`: the weight.
    - `seen`: zeros.
    - `axes`: those that products contract, counted from the end, as in a
        [`eqquant.QuantizedArray`][].
    - `lead`: those of a stack of matrices, likewise.
    - `every_row`: whether to count rows on which nothing depends, too.
    - `looked_up`: whether this array is rows that were looked up in the weight.
    """

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

    def dequantize(self) -> Float[Array, "..."]:
        """The weight. If it is rows that were looked up, their gradient is observed."""
        if not self.looked_up:
            return self.base
        others = self._others()
        order = [i + self.ndim for i in (*self.lead, *others, *self.axes)]
        rows = jnp.transpose(self.base, order)
        lead, size = rows.shape[: len(self.lead)], self.seen.gram.shape[-1]
        rows = rows.reshape(*lead, -1, size)
        seen = self.seen.gram, self.seen.rows, self.seen.power
        # Split over devices, a sum over mapped axes is JAX's to make.
        tie = _tie_lookup if has_explicit_axes() else observe_rows
        rows = tie(rows, *seen)
        rows = rows.reshape([self.shape[i] for i in order])
        return jnp.transpose(rows, [order.index(i) for i in range(self.ndim)])

    def _others(self) -> tuple[int, ...]:
        """The axes that are neither contracted nor of the stack."""
        known = {*self.axes, *self.lead}
        return tuple(axis for axis in range(-self.ndim, 0) if axis not in known)

    def _ties(self, x: Shaped[Array, "*batch rows size"], batch: int):
        """Zeros for each row of `x`, made of the parts of `seen`: if the cotangent of
        the first, `x @ gram`, is `x`, then that of `gram` is `x^T x`."""
        axes = tuple(range(batch))
        numbers = (((x.ndim - 1,), (batch,)), (axes, axes))
        x = lax.stop_gradient(x).astype(self.seen.gram.dtype)
        product = lax.dot_general(x, self.seen.gram, numbers, precision="highest")
        shape = x.shape[:-1]
        spread = lambda part: lax.broadcast_in_dim(part, shape, axes)
        return product, spread(self.seen.rows), spread(self.seen.power)

    #
    # Products
    #

    @property
    def rounds_activations(self) -> bool:
        return False

    def contract(
        self,
        x,
        over: Sequence[tuple[int, int]],
        batch: Sequence[tuple[int, int]] = (),
        *,
        precision: Any = None,
        out_dtype=None,
    ) -> Any:
        how: dict[str, Any] = {"precision": precision, "out_dtype": out_dtype}
        out = plain.contract(self.base, x, over, batch, **how)
        of_x = {axis - self.ndim: i for axis, i in (*over, *batch)}
        batched = [axis - self.ndim for axis, _ in batch]
        contracted = {axis - self.ndim for axis, _ in over}
        if contracted != set(self.axes) or not set(batched) <= set(self.lead):
            return out  # Another kind of product.

        # Both as (batch, rows, shared by the stack, size or outputs).
        used = set(of_x.values())
        free = [i for i in range(x.ndim) if i not in used]
        order = [*(of_x[i] for i in batched), *free, *(of_x[i] for i in self.axes)]
        stack = [x.shape[of_x[i]] for i in batched]
        size = math.prod(x.shape[of_x[i]] for i in self.axes)
        seen = jnp.transpose(lax.stop_gradient(x), order).reshape(*stack, -1, size)

        left = [axis for axis in range(-self.ndim, 0) if axis not in of_x]
        shared = [axis for axis in left if axis in self.lead]
        outs = [axis for axis in left if axis not in self.lead]
        before = out.ndim - len(left)
        place = {axis: before + i for i, axis in enumerate(left)}
        n = len(batched)
        to_front = [
            *range(n),
            *(place[axis] for axis in shared),
            *range(n, before),
            *(place[axis] for axis in outs),
        ]
        stack += [self.shape[axis] for axis in shared]
        seen = seen.reshape(*seen.shape[:n], *(1 for _ in shared), *seen.shape[n:])
        seen = jnp.broadcast_to(seen, (*stack, *seen.shape[-2:]))
        rows = jnp.transpose(out, to_front)
        shape = rows.shape
        rows = rows.reshape(*stack, seen.shape[-2], -1)
        # Of the stack in the order of the weight.
        now = [*batched, *shared]
        sort = sorted(range(len(now)), key=now.__getitem__)
        tail = [len(now), len(now) + 1]
        sorted_ = lambda a: jnp.transpose(a, (*sort, *tail))
        seen, rows = sorted_(seen), sorted_(rows)
        ties = self._ties(seen, len(now))
        rows = _tie_product[self.every_row](rows, *ties, seen)
        rows = jnp.transpose(rows, (*_inverse(sort), *tail)).reshape(shape)
        return jnp.transpose(rows, _inverse(to_front))

    #
    # Structure
    #

    def _with(self, base, fn: Callable[[Array], Array] | None = None, **fields):
        """Another base, and `fn` of what has the axes of the stack."""
        seen = self.seen if fn is None else jax.tree.map(fn, self.seen)
        names = ("axes", "lead", "every_row", "looked_up")
        static = {name: fields.get(name, getattr(self, name)) for name in names}
        return ObservedArray(base, seen, **static)

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
        whole = (*self.axes, *self._others()) if self.lead else self.axes
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
            shape[axis] != self.shape[axis] for axis in self._others()
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


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _pass(out, *_):
    return out


def _forward_product(out, gram, rows, power, x):
    return out, (x, jnp.zeros((), gram.dtype))


def _backward_product(every_row: bool, residuals, ct):
    x, like = residuals
    live = jnp.ones(ct.shape[:-1], bool) if every_row else jnp.any(ct != 0, -1)
    of_gram = jnp.where(live[..., None], x, 0).astype(like.dtype)
    power = jnp.sum(jnp.square(ct.astype(like.dtype)), -1)
    return ct, of_gram, live.astype(like.dtype), power, jnp.zeros_like(x)


def _tie(every_row: bool) -> Callable:
    """`tie(out, gram, rows, power, x)` is `out`. For each row of `out` with a cotangent
    that is not zero, the cotangent of `gram` is `x`, that of `rows` is 1, and that of
    `power` is the squared norm of the cotangent of `out`."""
    tie = jax.custom_vjp(_pass)
    tie.defvjp(_forward_product, ft.partial(_backward_product, every_row))
    return tie


_tie_product = {every_row: _tie(every_row) for every_row in (False, True)}


@jax.custom_vjp
def _tie_lookup(rows, gram, count, power):
    """As `observe_rows`."""
    return rows


def _forward_lookup(rows, gram, count, power):
    return rows, jnp.zeros((), gram.dtype)


def _backward_lookup(like, ct):
    return ct, *sums_of_rows(ct, ct.ndim - 2, like.dtype)


_tie_lookup.defvjp(_forward_lookup, _backward_lookup)
