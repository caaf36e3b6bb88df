"""The logical axes of an array that is a stack of matrices."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Shaped


def canonical_axes(axis: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Check axes, and return them sorted and counted from the end."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    for a in axes:
        if not -ndim <= a < ndim:
            raise ValueError(
                f"axis must be between {-ndim} and {ndim - 1} for an array of {ndim} "
                f"axes, got {axis}."
            )
    out = tuple(sorted(a % ndim - ndim for a in axes))
    if not out or len(set(out)) != len(out):
        raise ValueError(f"axis must name one axis or several distinct, got {axis}.")
    return out


def other_axes(ndim: int, *groups: Sequence[int]) -> tuple[int, ...]:
    """Return the axes that are in none of the groups, counted from the front."""
    used = {axis % ndim for group in groups for axis in group}
    return tuple(axis for axis in range(ndim) if axis not in used)


def problems_of_axes(axes: Sequence[int], ndim: int) -> Iterator[str]:
    """Yield a message if axes, counted from the end, are not valid."""
    is_valid = all(type(a) is int and -ndim <= a < 0 for a in axes)
    if not is_valid or len(set(axes)) != len(axes):
        yield f"axes must be different, and from {-ndim} to -1; got {tuple(axes)}."


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """The axes of an array that is a stack of matrices, counted from the end.

    **Fields:**

    - `inputs`: the axes that a product contracts.
    - `outputs`: the axes of the results of a product.
    - `stack`: the axes that count matrices.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stack: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        ndim: int,
        inputs: int | Sequence[int],
        outputs: int | Sequence[int] | None = None,
    ) -> "MatrixAxes":
        """Check the axes. By default, all axes except the inputs are outputs."""
        inputs = canonical_axes(inputs, ndim)
        others = tuple(axis - ndim for axis in other_axes(ndim, inputs))
        outputs = others if outputs is None else canonical_axes(outputs, ndim)
        stack = tuple(axis for axis in others if axis not in outputs)
        return cls(inputs, outputs, stack)

    @property
    def order(self) -> list[int]:
        """The permutation to stacked axes, output axes and input axes."""
        axes = (*self.stack, *self.outputs, *self.inputs)
        return [axis + len(axes) for axis in axes]

    def as_matrices(self, array: Shaped[Array, "..."]):
        """Reshape an array to `(stack, outputs, inputs)`."""
        stack = math.prod(array.shape[axis] for axis in self.stack)
        size = math.prod(array.shape[axis] for axis in self.inputs)
        return jnp.transpose(array, self.order).reshape(stack, -1, size)

    def from_matrices(self, matrices: Shaped[Array, "stack outputs inputs"], shape):
        """Invert [`as_matrices`][], for an array of the given shape."""
        out = matrices.reshape([shape[axis] for axis in self.order])
        return jnp.transpose(out, inverse_order(self.order))

    def scales_as_matrices(self, scales: Shaped[Array, "*lead blocks"], shape):
        """Reshape the scales of a quantized array of the given shape, which is blocked
        along the inputs, to `(stack, outputs, blocks)`."""
        order = self.order[: -len(self.inputs)]
        stored = sorted(order)
        scales = jnp.transpose(scales, (*map(stored.index, order), len(order)))
        stack = math.prod(shape[axis] for axis in self.stack)
        return scales.reshape(stack, -1, scales.shape[-1])

    def scales_from_matrices(
        self, scales: Shaped[Array, "stack outputs blocks"], shape
    ):
        """Invert [`scales_as_matrices`][]."""
        order = self.order[: -len(self.inputs)]
        scales = scales.reshape(*(shape[axis] for axis in order), scales.shape[-1])
        return jnp.transpose(scales, (*inverse_order(order), len(order)))


def inverse_order(order: Sequence[int]) -> list[int]:
    """Return the permutation that sorts `order`."""
    return sorted(range(len(order)), key=order.__getitem__)
