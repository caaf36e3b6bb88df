"""Arrays that observe their inputs.

The statistics are gradients with respect to zeros that do not change the value. So
observation is pure, and works for all differentiable code, under `jit`, `vmap`, `scan`
and `checkpoint`.
"""

import functools as ft
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Shaped

from ..._jax import has_explicit_axes
from ...arrays import (
    ArrayOperators,
    contract,
    Contraction,
    Cut,
    Gather,
    inverse_order,
    MatrixAxes,
    Operation,
    other_axes,
    Role,
    scaled,
)
from ...partition import split_by_type
from ...primitives import observe_product, observe_rows
from ._ties import tie_lookup, tie_product


# The name of the mapped axis of the float model and the quantized model.
MODELS = "eqquant_models"


class Observed(eqx.Module):
    """Statistics of the inputs of a weight: sums over the rows of its activations.

    **Fields:**

    - `gram`: `(*stack, size, size)`: the upper triangle of the sum of outer products
        of the rows, `X^T X`. Values below may be zeros. For a lookup of rows of the
        weight, `X` contains the gradients with respect to the rows.
    - `rows`: `(*stack)`: the number of rows.
    - `power`: `(*stack)`: the sum of squared gradients with respect to the outputs.
    - `peak`: `(*stack)`: the sum of the largest magnitude of each row. Zero for
        lookups.
    - `shift`: `(*stack, size, size)`: the sum of `(F - X)^T X` for the rows `F` of the
        float model, if `X` contains the rows of the quantized model. Otherwise None.
    """

    gram: Float[Array, "*stack size size"]
    rows: Float[Array, "*stack"]
    power: Float[Array, "*stack"]
    peak: Float[Array, "*stack"]
    shift: Float[Array, "*stack size size"] | None = None

    @classmethod
    def zeros(
        cls, stack: Sequence[int], size: int, dtype, has_shift: bool = False
    ) -> "Observed":
        zeros = lambda *shape: jnp.zeros((*stack, *shape), dtype)
        shift = zeros(size, size) if has_shift else None
        return cls(zeros(size, size), zeros(), zeros(), zeros(), shift)


@jax.jit
def symmetric(gram: Float[Array, "*stack size size"]):
    """Mirror the upper triangle of Gram matrices."""
    return jnp.triu(gram) + jnp.swapaxes(jnp.triu(gram, 1), -1, -2)


class Uses:
    """A record of how a weight was used while a function was traced. Compared by
    identity."""

    def __init__(self):
        self.has_products = self.has_lookups = False


class ObservedArray(ArrayOperators):
    """A weight whose gradient contains statistics of its inputs.

    The value and the derivatives equal the base. The gradients with respect to
    `products` and `lookups` are an [`Observed`][], for every differentiated function.
    Rows without influence on the function, such as padding, are left out.

    **Fields:**

    - `base`: the weight.
    - `products`, `lookups`: zeros for the statistics of products, and of lookups of
        rows. None if the statistics are not recorded.
    - `inputs`: the contracted axes, counted from the end.
    - `stack`: the axes of a stack of matrices, counted from the end.
    - `every_row`: whether to also count rows without influence.
    - `looked_up`: whether this array consists of rows from a lookup.
    - `unit`: a factor of the rows of `products`, a power of two.
    - `uses`: a record of the uses while the function is traced, or None.
    - `curvature`: whether products also observe the gradient of the weight.
    - `paired`: whether the function is mapped over the float model and the quantized
        model. Only the quantized model contributes to the statistics.
    """

    roles: ClassVar[Mapping[str, Role]] = {"inputs": "whole", "stack": "kept"}

    base: Float[Array, "..."]
    products: Observed | None
    lookups: Observed | None
    inputs: tuple[int, ...] = eqx.field(static=True)
    stack: tuple[int, ...] = eqx.field(static=True)
    every_row: bool = eqx.field(static=True, default=False)
    looked_up: bool = eqx.field(static=True, default=False)
    unit: float = eqx.field(static=True, default=1.0)
    uses: Uses | None = eqx.field(static=True, default=None)
    curvature: bool = eqx.field(static=True, default=False)
    paired: bool = eqx.field(static=True, default=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def dtype(self) -> np.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.dtype

    @property
    def is_whole(self) -> bool:
        sums = [x.gram for x in (self.products, self.lookups) if x is not None]
        return all(hasattr(x, "shape") for x in (self.base, *sums))

    @property
    def outputs(self) -> tuple[int, ...]:
        """The axes that are neither inputs nor of the stack, counted from the end."""
        others = other_axes(self.ndim, self.inputs, self.stack)
        return tuple(axis - self.ndim for axis in others)

    def dequantize(self) -> Float[Array, "..."]:
        """Return the weight. For rows from a lookup, also observe their gradient."""
        if self.looked_up and self.uses is not None:
            self.uses.has_lookups = True
        return self._tied() if self.looked_up else self.base

    def _tied(self) -> Float[Array, "..."]:
        """Return the weight, and tie the statistics of its gradient to it."""
        if self.lookups is None:
            return self.base
        sums = self.lookups
        # Within `vmap` and `scan`, the weight lacks stacked axes.
        stacked = tuple(axis for axis in self.stack if axis >= -self.ndim)
        outputs = other_axes(self.ndim, self.inputs, stacked)
        outputs = tuple(axis - self.ndim for axis in outputs)
        order = MatrixAxes(self.inputs, outputs, stacked).order
        transposed = jnp.transpose(self.base, order)
        stack = transposed.shape[: len(stacked)]
        rows = transposed.reshape(*stack, -1, sums.gram.shape[-1])
        # For sharded arrays, JAX sums over mapped axes.
        tie = tie_lookup if has_explicit_axes() else observe_rows
        tie = ft.partial(_in_quantized, tie) if self.paired else tie
        rows = tie(rows, sums.gram, sums.rows, sums.power)
        return jnp.transpose(rows.reshape(transposed.shape), inverse_order(order))

    #
    # Structure
    #

    def axes_of_parts(self, ndim: int, groups: Mapping[str, Sequence[int]]) -> Any:
        sums = (*groups["stack"], ...)
        return {"base": tuple(range(ndim)), "products": sums, "lookups": sums}

    @property
    def blocked_axes(self) -> tuple[int, ...]:
        return tuple(axis + self.ndim for axis in self.inputs)

    @property
    def whole_axes(self) -> int | None:
        # A lookup selects rows of a matrix, or matrices of a stack.
        whole = (*self.inputs, *self.outputs) if self.stack else self.inputs
        n = len(whole)
        return n if sorted(whole) == list(range(-n, 0)) else None

    def move(self, operation: Operation) -> Any:
        out = super().move(operation)
        if out is NotImplemented:
            return NotImplemented
        takes_rows = False
        if isinstance(operation, Cut):
            takes_rows = any(out.shape[i] != self.shape[i] for i in self.outputs)
        elif isinstance(operation, Gather):
            takes_rows = not self.stack
        return out.replace(looked_up=True) if takes_rows else out

    def with_dtype(self, dtype) -> "ObservedArray":
        return self.replace(base=self.base.astype(dtype))

    def scale_parts(self, factor: Shaped[Array, "..."], fn: Callable) -> Any:
        return self.replace(base=scaled(self.base, factor, fn))

    def can_split(self, axis: int, parts: int) -> bool:
        return False

    #
    # Products
    #

    def _observe(
        self,
        products: Shaped[Array, "*stack rows outputs"],
        x: Shaped[Array, "*stack rows size"],
        sums: Observed,
    ) -> Shaped[Array, "*stack rows outputs"]:
        """Return the products with the rows of `x`, and tie statistics to them."""
        x = lax.stop_gradient(x)
        if not has_explicit_axes():
            parts = sums.gram, sums.rows, sums.power, sums.peak
            tie = ft.partial(observe_product, every_row=self.every_row)
            if not self.paired:
                return tie(products, x, *parts)
            wide = x.astype(sums.gram.dtype)
            rows_of_float, rows = lax.all_gather(wide, MODELS)
            parts = rows, *parts, rows_of_float - rows, sums.shift
            return _in_quantized(tie, products, *parts)
        # For sharded arrays, JAX sums over mapped axes. If the cotangent of `x @ gram`
        # is `x`, the cotangent of `gram` is `x^T x`.
        axes = tuple(range(x.ndim - 2))
        numbers = (((x.ndim - 1,), (x.ndim - 2,)), (axes, axes))
        wide = x.astype(sums.gram.dtype)
        gram = lax.dot_general(wide, sums.gram, numbers, precision="highest")
        spread = lambda part: lax.broadcast_in_dim(part, x.shape[:-1], axes)
        ties = gram, *map(spread, (sums.rows, sums.power, sums.peak))
        return tie_product[self.every_row](products, *ties, x)

    @property
    def rounds_activations(self) -> bool:
        return False

    def contract(self, x, contraction: Contraction) -> Any:
        base = self._tied() if self.curvature else self.base
        out = contract(base, x, contraction, vector_first=True)
        over, batch = contraction.over, contraction.batch
        x_axis_of = {axis - self.ndim: i for axis, i in (*over, *batch)}
        batched = [axis - self.ndim for axis, _ in batch]
        contracted = {axis - self.ndim for axis, _ in over}
        if contracted != set(self.inputs) or not set(batched) <= set(self.stack):
            return out  # An unsupported kind of product.
        if self.uses is not None:
            self.uses.has_products = True
        if self.products is None:
            return out

        # Bring both to the axes (batch, axes that share `x`, rows, size or outputs).
        x_batch = [x_axis_of[axis] for axis in batched]
        x_inputs = [x_axis_of[axis] for axis in self.inputs]
        tokens = other_axes(x.ndim, x_batch, x_inputs)
        stack = [x.shape[i] for i in x_batch]
        size = math.prod(x.shape[i] for i in x_inputs)
        rows = jnp.transpose(lax.stop_gradient(x), (*x_batch, *tokens, *x_inputs))
        rows = _with_whole_rows(rows.reshape(*stack, -1, size))

        free = [axis for axis in range(-self.ndim, 0) if axis not in x_axis_of]
        sharing = [axis for axis in free if axis in self.stack]
        first_free, n = out.ndim - len(free), len(batched)
        place = {axis: first_free + i for i, axis in enumerate(free)}
        order = [
            *range(n),
            *(place[axis] for axis in sharing),
            *range(n, first_free),
            *(place[axis] for axis in free if axis not in sharing),
        ]
        stack += [self.shape[axis] for axis in sharing]
        rows = rows.reshape(*rows.shape[:n], *(1 for _ in sharing), *rows.shape[n:])
        rows = jnp.broadcast_to(rows, (*stack, *rows.shape[-2:]))
        products = jnp.transpose(out, order)
        shape = products.shape
        products = products.reshape(*stack, rows.shape[-2], -1)
        # Sort the axes of the stack like the axes of the weight.
        last = len(stack), len(stack) + 1
        sort = (*inverse_order([*batched, *sharing]), *last)
        rows, products = jnp.transpose(rows, sort), jnp.transpose(products, sort)
        if self.unit != 1:
            rows = rows.astype(self.products.gram.dtype) * self.unit
        products = self._observe(products, rows, self.products)
        products = jnp.transpose(products, inverse_order(sort)).reshape(shape)
        return jnp.transpose(products, inverse_order(order))


def _in_quantized(tie: Callable, out: Shaped[Array, "..."], *args) -> Any:
    """Apply `tie` to the array of the quantized model only."""
    tied = tie(lax.all_gather(out, MODELS)[1], *args)
    return jnp.where(lax.axis_index(MODELS) == 1, tied, out)


def _with_whole_rows(x: Shaped[Array, "*stack rows size"]):
    """Gather rows that a mesh with explicit axes splits.

    `gram` contains the product of every pair of values in a row.
    """
    *names, names_of_size = split_by_type(x)
    if not names_of_size:
        return x
    return jax.sharding.reshard(x, PartitionSpec(*(n or None for n in names), None))
