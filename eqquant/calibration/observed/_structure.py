"""The fields of an observing array, and the axes of its sums."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from ...arrays import (
    ArrayOperators,
    Cut,
    Gather,
    MatrixAxes,
    Operation,
    other_axes,
    Role,
    scaled,
)


class Observed(eqx.Module):
    """Statistics of the inputs of a weight: sums over the rows of its activations.

    **Fields:**

    - `gram`: `(*stack, size, size)`: the sum of outer products of the rows, `X^T X`.
        For a lookup of rows of the weight, `X` contains the gradients with respect to
        the rows.
    - `rows`: `(*stack)`: the number of rows.
    - `power`: `(*stack)`: the sum of squared gradients with respect to the outputs.
    """

    gram: Float[Array, "*stack size size"]
    rows: Float[Array, "*stack"]
    power: Float[Array, "*stack"]

    @classmethod
    def zeros(cls, stack: Sequence[int], size: int, dtype) -> "Observed":
        zeros = lambda *shape: jnp.zeros((*stack, *shape), dtype)
        return cls(zeros(size, size), zeros(), zeros())


class AbstractObservedArray(ArrayOperators):
    """The fields of an `ObservedArray`, and their axes."""

    roles: ClassVar[Mapping[str, Role]] = {"inputs": "whole", "stack": "kept"}

    base: Float[Array, "..."]
    sums: Observed
    inputs: tuple[int, ...] = eqx.field(static=True)
    stack: tuple[int, ...] = eqx.field(static=True)
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
        return all(hasattr(x, "shape") for x in (self.base, self.sums.gram))

    @property
    def outputs(self) -> tuple[int, ...]:
        """The axes that are neither inputs nor of the stack, counted from the end."""
        others = other_axes(self.ndim, self.inputs, self.stack)
        return tuple(axis - self.ndim for axis in others)

    @property
    def matrix_axes(self) -> MatrixAxes:
        return MatrixAxes(self.inputs, self.outputs, self.stack)

    #
    # Structure
    #

    def axes_of_parts(self, ndim: int, groups: Mapping[str, Sequence[int]]) -> Any:
        return {"base": tuple(range(ndim)), "sums": (*groups["stack"], ...)}

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

    def with_dtype(self, dtype) -> "AbstractObservedArray":
        return self.replace(base=self.base.astype(dtype))

    def scale_parts(self, factor: Shaped[Array, "..."], fn: Callable) -> Any:
        return self.replace(base=scaled(self.base, factor, fn))

    def split_specs(self, spec, mesh) -> Any:
        return NotImplemented
