"""Weights as stacks of matrices, outputs by contracted values."""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from ..arrays import canonical_axes


@dataclasses.dataclass(frozen=True)
class Layout:
    """The contracted axes and the stacked axes of a weight, counted from the end."""

    axes: tuple[int, ...]
    lead: tuple[int, ...]

    @classmethod
    def of(
        cls, axis: int | tuple[int, ...], out: int | None, is_table: bool, ndim: int
    ) -> "Layout":
        """Return the layout of a weight.

        If its layer declares no output axis, this is the last axis that is not
        contracted. In a table, all axes that are not contracted are outputs.
        """
        axes = canonical_axes(axis, ndim)
        others = [a for a in range(-ndim, 0) if a not in axes]
        if out is not None:
            lead = [a for a in others if a != out % ndim - ndim]
        else:
            lead = [] if is_table else others[:-1]
        return cls(axes, tuple(lead))

    def order(self, ndim: int) -> list[int]:
        """The permutation to stacked axes, output axes and contracted axes."""
        outs = [a for a in range(-ndim, 0) if a not in {*self.axes, *self.lead}]
        return [a + ndim for a in (*self.lead, *outs, *self.axes)]

    def as_matrices(self, array: Shaped[Array, "..."]):
        """Reshape a weight to `(stack, outputs, size)`."""
        shape, n = array.shape, array.ndim
        stack = math.prod(shape[a] for a in self.lead)
        size = math.prod(shape[a] for a in self.axes)
        return jnp.transpose(array, self.order(n)).reshape(stack, -1, size)

    def from_matrices(self, matrices: Shaped[Array, "stack outs size"], shape):
        """Invert [`as_matrices`][], for an array of the given shape."""
        order = self.order(len(shape))
        out = matrices.reshape([shape[i] for i in order])
        return jnp.transpose(out, [order.index(i) for i in range(len(shape))])

    def scales_from_matrices(self, scales: Shaped[Array, "stack outs blocks"], shape):
        """Reshape scales to the layout of a quantized array of the given shape."""
        order = self.order(len(shape))[: -len(self.axes)]
        scales = scales.reshape(*(shape[i] for i in order), scales.shape[-1])
        natural = sorted(range(len(order)), key=order.__getitem__)
        return jnp.transpose(scales, (*natural, len(order)))

    def scales_as_matrices(self, scales: Shaped[Array, "*lead blocks"], shape):
        """Invert [`scales_from_matrices`][]."""
        order = self.order(len(shape))[: -len(self.axes)]
        natural = sorted(order)
        scales = jnp.transpose(scales, (*map(natural.index, order), len(order)))
        stack = math.prod(shape[a] for a in self.lead)
        return scales.reshape(stack, -1, scales.shape[-1])
