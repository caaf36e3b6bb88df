"""`ImplicitArray`: the interface of an array that is stored in parts.

The parts are a pytree: codes and scales, or a weight and the adapter beside it. The
array itself is never formed. Operators, indexing, rules and control flow use this
interface, and know nothing of the parts.
"""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TYPE_CHECKING, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Shaped

from ._materialise import materialise


class ImplicitArray(eqx.Module):
    """An array in parts.

    Structural methods are exact, and never decode: each returns an implicit array of
    the same kind, or `NotImplemented` where that is not possible.
    """

    if TYPE_CHECKING:
        dtype: ClassVar[Any]  # A field or a property.

    #
    # What it stands for
    #

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """That of the array that it stands for, derived from the parts."""

    @property
    @abc.abstractmethod
    def is_whole(self) -> bool:
        """Whether the parts are there: `eqx.partition` and the like take some away."""

    @abc.abstractmethod
    def dequantize(self) -> Float[Array, "..."]:
        """The array that this one stands for, in floating point."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all the parts together."""
        return sum(
            math.prod(part.shape) * part.dtype.itemsize
            for part in jax.tree.leaves(self)
        )

    def check_whole(self) -> None:
        """An error for what is but a part of an array: that which `eqx.partition` left,
        or a gradient."""
        if not self.is_whole:
            raise TypeError(
                f"{self!r} lacks some of its parts, and cannot be used. If "
                "`eqx.partition` took them away, put them back with `eqx.combine`."
            )

    #
    # Structure
    #

    @property
    @abc.abstractmethod
    def blocked_axes(self) -> tuple[int, ...]:
        """The axes that cannot be cut anywhere, counted from the front."""

    @property
    @abc.abstractmethod
    def whole_axes(self) -> int | None:
        """How many axes, at the end, [`gather`][] leaves whole; None if it cannot."""

    @abc.abstractmethod
    def gather(self, fn: Callable[[Array, Any], Array], fill: Any = None) -> Any:
        """`fn(part, fill)`, which takes from the axes of a part but its last, with the
        [`whole_axes`][] of each flattened into that one. Where it takes what is not
        there, it fills in `fill`: None for whatever it likes, 0, or NaN."""

    @abc.abstractmethod
    def permute(self, permutation: Sequence[int]) -> Any:
        """As `lax.transpose`."""

    @abc.abstractmethod
    def with_dtype(self, dtype) -> Any:
        """The same parts, standing for an array of another floating-point dtype."""

    @abc.abstractmethod
    def with_shape(self, shape: Sequence[int]) -> Any:
        """As `lax.reshape`."""

    @abc.abstractmethod
    def broadcast_in_dim(self, shape: Sequence[int], dimensions: Sequence[int]) -> Any:
        """As `lax.broadcast_in_dim`."""

    @abc.abstractmethod
    def slice(
        self,
        start: Sequence[int],
        limit: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> Any:
        """As `lax.slice`."""

    @abc.abstractmethod
    def dynamic_slice(self, start: Sequence[Any], sizes: Sequence[int]) -> Any:
        """As `lax.dynamic_slice`."""

    @abc.abstractmethod
    def reverse(self, dimensions: Sequence[int]) -> Any:
        """As `lax.rev`."""

    @abc.abstractmethod
    def drop_axes(self, dimensions: Sequence[int]) -> Any:
        """As `lax.squeeze`, of axes that are not blocked."""

    @abc.abstractmethod
    def concatenate(self, others: Sequence[Any], dimension: int) -> Any:
        """As `lax.concatenate`, with others of the same structure after this one."""

    @abc.abstractmethod
    def scale_parts(self, factor: Shaped[Array, "..."], fn: Callable) -> Any:
        """[`scaled`][], by a factor with as many axes as the array. Each has one
        element, or as many as that axis of the array."""

    def power(self, exponent: int) -> Any:
        """As `lax.integer_pow`."""
        return self if exponent == 1 else NotImplemented

    def put(
        self, rows: Shaped[Array, "..."], fn: Callable[[Array, Array], Array]
    ) -> Any:
        """Replace whole rows. `rows` has the blocked axes, counted from the end. It is
        split into the same parts, and `fn(part, new)` puts each of them in place."""
        return NotImplemented

    @abc.abstractmethod
    def split_specs(self, spec: PartitionSpec, mesh) -> Any:
        """A tree of the same structure, of a `PartitionSpec` for each part, that split
        them over the mesh as `spec` splits the array."""

    #
    # Products
    #

    @property
    @abc.abstractmethod
    def rounds_activations(self) -> bool:
        """Whether a product rounds the activation to int8: so does one with the array
        decoded, wherever [`contract`][] cannot serve."""

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
        """Contract the pairs of axes `over` (of this array, of `x`), with the pairs
        `batch` as batch axes. The result's axes are: batch, free axes of `x`, free axes
        of this array. On a mesh with explicit axes `out_sharding` says how it is split.
        """

    #
    # All that follows from it
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
            raise ValueError(f"mT: needs two axes or more, got shape {self.shape}.")
        *lead, i, j = range(self.ndim)
        return self.transpose(*lead, j, i)

    def broadcast_to(self, shape: Sequence[int]):
        """As `jnp.broadcast_to`."""
        if tuple(shape) == self.shape:
            return self
        offset = len(shape) - self.ndim
        return self.broadcast_in_dim(shape, range(offset, len(shape)))

    def squeeze(self, dimensions: Sequence[int]):
        """As `lax.squeeze`. What is left with fewer than two axes is an activation
        rather than a weight, and comes back in floating point."""
        blocked = any(axis in self.blocked_axes for axis in dimensions)
        if self.ndim - len(dimensions) < 2 or blocked:
            return jnp.squeeze(self.dequantize(), tuple(dimensions))
        return self.drop_axes(dimensions)

    def scaled(self, factor: Shaped[Array, "..."], fn: Callable = lax.mul) -> Any:
        """`fn(array, factor)`, a product or a quotient. The factor has the dtype of the
        array, broadcasts to its shape, and is constant along the blocked axes."""
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
        """As `jnp.copy`, of the parts."""
        return jax.tree.map(jnp.copy, self)

    def block_until_ready(self):
        """Wait until the parts are computed."""
        return jax.block_until_ready(self)

    def reshape(self, *shape):
        """As `jnp.reshape`: exact where the blocked axis stays whole; otherwise the
        array is dequantized, with a warning."""
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
        """The same parts, standing for an array of another floating-point dtype. Any
        other dtype: a plain array, with a warning."""
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            return materialise(self, f"astype({dtype})", "warn").astype(dtype)
        return self.with_dtype(dtype)


def _canonical_axis(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} is out of range for an array of {ndim} axes.")
    return axis % ndim


def is_implicit(x: Any) -> TypeGuard[ImplicitArray]:
    """Whether `x` is an implicit array, with all of its parts. Use it as `is_leaf`."""
    return isinstance(x, ImplicitArray) and x.is_whole
