"""`ImplicitArray`: the interface of an array that is stored in parts.

The parts are a pytree, for example codes and scales, or a weight and its adapter.
Operators, indexing, rules and control flow use this interface and never the parts.
"""

import abc
import functools as ft
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TYPE_CHECKING, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from ._contraction import Contraction
from ._materialise import materialise
from ._parts import ArrayInParts


class ImplicitArray(ArrayInParts):
    """An array in parts: its value, its products, and methods of arrays."""

    # The classes, other than arrays, that a part may have.
    part_types: ClassVar[Mapping[str, tuple[type, ...]]] = {}
    # The part that checkpoints store in place of the array, if the other parts only
    # describe its products.
    stored_part: ClassVar[str | None] = None
    # Advice for an array that was passed instead of a plain array.
    _misplaced: ClassVar[str] = "Dequantize it first, with `eqquant.dequantize`."

    if TYPE_CHECKING:
        dtype: ClassVar[Any]  # A field or a property.

    #
    # The array that the parts stand for
    #

    @property
    @abc.abstractmethod
    def is_whole(self) -> bool:
        """Whether no part is missing. `eqx.partition` removes parts, for example."""

    @abc.abstractmethod
    def dequantize(self) -> Float[Array, "..."]:
        """Return the array that the parts stand for, in floating point."""

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

    def problems(self) -> Iterator[str | Exception]:
        """Yield each invariant that the parts violate. Parts from a file may be
        arbitrary, and a product of parts that do not fit would read out of bounds.

        The parts may be abstract. A check may rely on the checks before it.
        """
        if not self.is_whole:
            yield f"{type(self).__name__} must have all of its parts."

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

    def rows_to_put(self) -> tuple[Any, tuple[int, ...], int | None]:
        """Return this array with the axes of the rows of [`put`][] as its last axes,
        the permutation, and the number of axes of a row."""
        rows, axes = self.rows_last()
        return rows, axes, rows.whole_axes

    @property
    def updates_slices(self) -> bool:
        """Whether [`update`][] replaces a slice of rows at less cost than [`put`][]."""
        return False

    def update(self, rows: Shaped[Array, "..."], start: Sequence[Any]) -> Any:
        """As `lax.dynamic_update_slice` of whole rows. No start is negative."""
        lead = [
            start[axis] for axis in range(self.ndim) if axis not in self.blocked_axes
        ]
        dtype = jnp.result_type(*start)
        first = [jnp.asarray(i, dtype) for i in (*lead, 0)]
        update = ft.partial(
            lax.dynamic_update_slice, start_indices=first, allow_negative_indices=False
        )
        return self.put(rows, update)

    #
    # Products
    #

    @property
    @abc.abstractmethod
    def rounds_activations(self) -> bool:
        """Whether products round the activation to int8. Where [`contract`][] cannot
        serve, the product with the decoded array also rounds it."""

    @abc.abstractmethod
    def contract(self, x: Shaped[Array, "..."], contraction: Contraction) -> Any:
        """Contract this array with `x`. The result has these axes: batch, free axes of
        `x`, free axes of this array."""

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


Class = TypeVar("Class", bound=type[ImplicitArray])

# The classes of implicit arrays that checkpoints may contain, by name.
stored_classes: dict[str, type[ImplicitArray]] = {}


def stored(cls: Class) -> Class:
    """Decorate a class of implicit arrays that checkpoints may contain."""
    stored_classes[cls.__name__] = cls
    return cls


def is_implicit(x: Any) -> TypeGuard[ImplicitArray]:
    """Return whether `x` is an implicit array with all of its parts. Use it as
    `is_leaf`."""
    return isinstance(x, ImplicitArray) and x.is_whole
