"""Arrays that observe their inputs.

The statistics are gradients with respect to zeros that do not change the value. So
observation is pure, and works for all differentiable code, under `jit`, `vmap`, `scan`
and `checkpoint`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Shaped

from ..._jax import has_explicit_axes
from ...partition import split_by_type
from ...primitives import observe_rows
from .. import _plain as plain
from ._structure import AbstractObservedArray
from ._ties import tie_lookup, tie_product


class ObservedArray(AbstractObservedArray):
    """A weight whose gradient contains statistics of its inputs.

    Values and derivatives equal those of `base`. The gradient with respect to `seen` is
    an [`Observed`][], for every differentiated function. Rows without influence on the
    function, such as padding, are left out.

    **Fields:**

    - `base`: the weight.
    - `seen`: zeros.
    - `axes`: the contracted axes, counted from the end, as in a
        [`eqquant.QuantizedArray`][].
    - `lead`: the axes of a stack of matrices, counted from the end.
    - `every_row`: whether to also count rows without influence.
    - `looked_up`: whether this array consists of rows from a lookup.
    """

    def dequantize(self) -> Float[Array, "..."]:
        """Return the weight. For rows from a lookup, also observe their gradient."""
        if not self.looked_up:
            return self.base
        others = self.others
        order = [i + self.ndim for i in (*self.lead, *others, *self.axes)]
        rows = jnp.transpose(self.base, order)
        lead, size = rows.shape[: len(self.lead)], self.seen.gram.shape[-1]
        rows = rows.reshape(*lead, -1, size)
        seen = self.seen.gram, self.seen.rows, self.seen.power
        # For sharded arrays, JAX sums over mapped axes.
        tie = tie_lookup if has_explicit_axes() else observe_rows
        rows = tie(rows, *seen)
        rows = rows.reshape([self.shape[i] for i in order])
        return jnp.transpose(rows, [order.index(i) for i in range(self.ndim)])

    def _ties(self, x: Shaped[Array, "*batch rows size"], batch: int):
        """Return zeros for each row of `x`, computed from the parts of `seen`.

        The first is `x @ gram`. If its cotangent is `x`, the cotangent of `gram` is
        `x^T x`.
        """
        axes = tuple(range(batch))
        numbers = (((x.ndim - 1,), (batch,)), (axes, axes))
        x = lax.stop_gradient(x).astype(self.seen.gram.dtype)
        product = lax.dot_general(x, self.seen.gram, numbers, precision="highest")
        shape = x.shape[:-1]
        spread = lambda part: lax.broadcast_in_dim(part, shape, axes)
        return product, spread(self.seen.rows), spread(self.seen.power)

    @property
    def rounds_activations(self) -> bool:
        return False

    def contract(
        self,
        x,
        over: Sequence[tuple[int, int]],
        batch: Sequence[tuple[int, int]] = (),
        **how,
    ) -> Any:
        out = plain.contract(self.base, x, over, batch, **how)
        of_x = {axis - self.ndim: i for axis, i in (*over, *batch)}
        batched = [axis - self.ndim for axis, _ in batch]
        contracted = {axis - self.ndim for axis, _ in over}
        if contracted != set(self.axes) or not set(batched) <= set(self.lead):
            return out  # An unsupported kind of product.

        # Both have the axes (batch, rows, shared by the stack, size or outputs).
        used = set(of_x.values())
        free = [i for i in range(x.ndim) if i not in used]
        order = [*(of_x[i] for i in batched), *free, *(of_x[i] for i in self.axes)]
        stack = [x.shape[of_x[i]] for i in batched]
        size = math.prod(x.shape[of_x[i]] for i in self.axes)
        seen = jnp.transpose(lax.stop_gradient(x), order).reshape(*stack, -1, size)
        seen = _with_whole_rows(seen)

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
        # The axes of the stack, in the order of the weight.
        now = [*batched, *shared]
        sort = sorted(range(len(now)), key=now.__getitem__)
        tail = [len(now), len(now) + 1]
        sorted_ = lambda a: jnp.transpose(a, (*sort, *tail))
        seen, rows = sorted_(seen), sorted_(rows)
        ties = self._ties(seen, len(now))
        rows = tie_product[self.every_row](rows, *ties, seen)
        rows = jnp.transpose(rows, (*_inverse(sort), *tail)).reshape(shape)
        return jnp.transpose(rows, _inverse(to_front))


def _with_whole_rows(x: Shaped[Array, "*stack rows size"]):
    """Gather rows that a mesh with explicit axes splits.

    `gram` contains the product of every pair of values in a row.
    """
    *names, of_row = split_by_type(x)
    if not of_row:
        return x
    return jax.sharding.reshard(x, PartitionSpec(*(n or None for n in names), None))


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
