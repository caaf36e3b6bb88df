"""Arrays that are stored in a rotated basis."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeGuard

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl
from jaxtyping import Array, Float, Shaped

from .._jax import typed
from ..partition import reshard_to
from ._axes import Operation, Slice
from ._cached import CachedArray
from ._contraction import Contraction
from ._hadamard import hadamard
from ._implicit import is_implicit, stored
from ._matrices import other_axes
from ._operators import ArrayOperators
from .quantized import QuantizedArray


@stored
class RotatedArray(ArrayOperators):
    """A quantized array whose last blocked axis is rotated, block by block, by the
    Hadamard matrix (QuIP, arXiv 2307.13304; QuaRot, arXiv 2404.00456).

    The rotation spreads a large value over its block, which removes outliers. A product
    rotates the activation instead of the weight: `(W H) (H x) = W x`. `dequantize` and
    lookups of rows rotate back to the original basis.

    [`eqquant.quantize_tree`][] makes one with `rotate=True`. It has the operators of a
    [`eqquant.QuantizedArray`][].

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        layer = eqx.nn.Linear(64, 32, key=jax.random.key(0))
        rotated = eqquant.quantize_tree(layer, "nf4", rotate=True).weight
        assert isinstance(rotated, eqquant.arrays.RotatedArray)
        assert rotated.dequantize().shape == rotated.shape == (32, 64)
        ```

    **Fields:**

    - `base`: the rotated weight, quantized, or the rotated cache.
    - `block`: the number of consecutive values that are rotated together, a power of
        two.
    """

    part_types: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "base": (QuantizedArray, CachedArray)
    }
    _misplaced = QuantizedArray._misplaced

    base: QuantizedArray | CachedArray
    block: int = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def dtype(self) -> np.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.dtype

    @property
    def format(self):
        return self.base.format

    @property
    def axes(self) -> tuple[int, ...]:
        return self.base.axes

    @property
    def axis(self) -> int:
        """The rotated axis, counted from the end."""
        return self.base.axes[-1]

    @property
    def is_whole(self) -> bool:
        return is_implicit(self.base)

    def dequantize(self) -> Float[Array, "..."]:
        """Return the array in its original basis, in floating point."""
        self.check_whole()
        return hadamard(self.base.dequantize(), self.axis, self.block)

    def problems(self) -> Iterator[str | Exception]:
        yield from super().problems()
        block, size = self.block, self.shape[self.axis]
        is_power = type(block) is int and block > 0 and block & (block - 1) == 0
        if not is_power or size % block:
            yield f"block must be a power of two that divides {size}, got {block}."

    #
    # Structure
    #

    def axes_of_parts(self, ndim: int, groups: Mapping[str, Sequence[int]]) -> Any:
        return {"base": tuple(range(ndim))}

    @property
    def blocked_axes(self) -> tuple[int, ...]:
        return self.base.blocked_axes

    @property
    def whole_axes(self) -> int | None:
        return self.base.whole_axes

    def move(self, operation: Operation) -> Any:
        """Slice the rotated axis only between its blocks."""
        if isinstance(operation, Slice):
            bounds = operation.start[self.axis], operation.limit[self.axis]
            if any(bound % self.block for bound in bounds):
                return NotImplemented
        return super().move(operation)

    def with_dtype(self, dtype) -> "RotatedArray":
        return self.replace(base=self.base.with_dtype(dtype))

    def scale_parts(self, factor: Shaped[Array, "..."], fn: Callable) -> Any:
        base = self.base.scale_parts(factor, fn)
        return base if base is NotImplemented else self.replace(base=base)

    def put(
        self, rows: Shaped[Array, "..."], fn: Callable[[Array, Array], Array]
    ) -> Any:
        return self._replaced(rows, lambda rows: self.base.put(rows, fn))

    def rows_to_put(self) -> tuple[Any, tuple[int, ...], int | None]:
        base, axes, count = self.base.rows_to_put()
        return self.replace(base=base), axes, count

    @property
    def updates_slices(self) -> bool:
        return self.base.updates_slices

    def update(self, rows: Shaped[Array, "..."], start: Sequence[Any]) -> Any:
        return self._replaced(rows, lambda rows: self.base.update(rows, start))

    def _replaced(self, rows: Shaped[Array, "..."], fn: Callable[[Array], Any]) -> Any:
        if rows.ndim < -self.axis or rows.shape[self.axis] != self.shape[self.axis]:
            return NotImplemented
        base = fn(hadamard(rows.astype(self.dtype), self.axis, self.block))
        return base if base is NotImplemented else self.replace(base=base)

    def can_split(self, axis: int, parts: int) -> bool:
        """Return whether each part of the rotated axis has whole blocks."""
        rotated = axis == self.axis + self.ndim
        return not rotated or self.shape[axis] % (parts * self.block) == 0

    #
    # Products
    #

    @property
    def rounds_activations(self) -> bool:
        return self.base.rounds_activations

    def contract(self, x, contraction: Contraction) -> Any:
        axis, x_axis_of = self.axis + self.ndim, dict(contraction.over)
        contracts = axis in x_axis_of
        if contracts:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                x = x.astype(jnp.promote_types(x.dtype, self.dtype))
            x = hadamard(x, x_axis_of[axis], self.block)
            return self.base.contract(x, contraction)
        replicated = dataclasses.replace(contraction, out_sharding=None)
        out = self.base.contract(x, replicated)
        batch = dict(contraction.batch)
        if out is NotImplemented or axis in batch:
            return NotImplemented
        free = other_axes(self.ndim, [*x_axis_of], [*batch])
        out = hadamard(out, free.index(axis) - len(free), self.block)
        return reshard_to(out, contraction.out_sharding)

    def __pdoc__(self, **kwargs):
        base = wl.pdoc(self.base, **kwargs)
        return wl.TextDoc(f"rotated[{self.block}](") + base + wl.TextDoc(")")


def is_quantized(x: Any) -> TypeGuard[QuantizedArray | RotatedArray]:
    """Return whether `x` is a [`eqquant.QuantizedArray`][] or a
    [`eqquant.arrays.RotatedArray`][] with all of its parts. Use it as `is_leaf`.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        tree = {"w": eqquant.quantize(weight, "nf4"), "b": weight[0]}
        formats = jax.tree.map(eqquant.is_quantized, tree, is_leaf=eqquant.is_quantized)
        assert formats == {"w": True, "b": False}
        ```
    """
    return isinstance(x, QuantizedArray | RotatedArray) and x.is_whole


@typed
def dequantize(x: Any) -> Any:
    """Decode a [`eqquant.QuantizedArray`][] or a [`eqquant.arrays.RotatedArray`][] to
    floating point. Return any other object unchanged.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, "int8")
        assert abs(eqquant.dequantize(q) - weight).max() < 0.02
        assert eqquant.dequantize(weight) is weight
        ```
    """
    return x.dequantize() if isinstance(x, QuantizedArray | RotatedArray) else x
