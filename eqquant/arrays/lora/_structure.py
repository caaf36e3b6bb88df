"""The fields of a weight with an adapter, and the axes of its parts."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, Shaped

from .. import _plain as plain
from .._axes import Axes, Role
from .._implicit import ImplicitArray, is_implicit
from .._matrices import other_axes, problems_of_axes
from .._operators import ArrayOperators


class AbstractLoraArray(ArrayOperators):
    """The fields of a [`eqquant.arrays.LoraArray`][], and their axes."""

    roles: ClassVar[Mapping[str, Role]] = {"in_axes": "free", "out_axes": "free"}

    part_types: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "base": (ImplicitArray,),
        "key": (type(None),),
    }

    base: Any
    a: Float[Array, "..."] | ImplicitArray
    b: Float[Array, "..."] | ImplicitArray
    key: Key[Array, "*lead"] | None
    scale: float = eqx.field(static=True)
    dropout: float = eqx.field(static=True)
    in_axes: tuple[int, ...] = eqx.field(static=True)
    out_axes: tuple[int, ...] = eqx.field(static=True)

    #
    # Shape and dtype
    #

    @property
    def is_whole(self) -> bool:
        if isinstance(self.base, ImplicitArray) and not self.base.is_whole:
            return False
        return all(hasattr(x, "shape") for x in (self.base, self.a, self.b))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape)

    @property
    def dtype(self):
        return self.base.dtype

    @property
    def rank(self) -> int:
        return self.b.shape[-1]

    @property
    def lead_axes(self) -> tuple[int, ...]:
        """The axes that the base, `a` and `b` share."""
        return other_axes(self.ndim, self.in_axes, self.out_axes)

    def problems(self) -> Iterator[str | Exception]:
        yield from super().problems()
        if isinstance(self.base, AbstractLoraArray):
            yield "base must not have an adapter."
        yield from problems_of_axes((*self.in_axes, *self.out_axes), self.ndim)
        for axes in (self.in_axes, self.out_axes):
            if not axes or axes != tuple(sorted(axes)):
                yield f"axes must be in ascending order, got {axes}."
        if not self.b.ndim:
            yield "b must have at least one axis."
        for name, axes in self.factors.items():
            part = getattr(self, name)
            expected = tuple(self.rank if i is None else self.shape[i] for i in axes)
            if part.shape != expected:
                yield f"{name} must have the shape {expected}, got {part.shape}."
            kind = jax.dtypes.prng_key if name == "key" else jnp.floating
            if not jnp.issubdtype(part.dtype, kind):
                yield f"{name} must be {kind.__name__}, got {part.dtype}."
        if not jnp.issubdtype(self.dtype, jnp.floating):
            yield f"base must be floating point, got {self.dtype}."
        if not math.isfinite(self.scale):
            yield f"scale must be finite, got {self.scale}."
        if not 0 <= self.dropout < 1:
            yield f"dropout must be in [0, 1), got {self.dropout}."

    #
    # Structure
    #

    @property
    def factors(self) -> dict[str, Axes]:
        """The axes of all parts except the base; None for the rank."""
        axes = self.axes_of_parts(self.ndim, self.groups)
        names = ("a", "b") if self.key is None else ("a", "b", "key")
        return {name: axes[name] for name in names}

    def axes_of_parts(self, ndim: int, groups: Mapping[str, Sequence[int]]) -> Any:
        ins, outs = groups["in_axes"], groups["out_axes"]
        lead = other_axes(ndim, ins, outs)
        return {
            "base": tuple(range(ndim)),
            "a": (*lead, None, *ins),
            "b": (*lead, *outs, None),
            "key": lead,
        }

    @property
    def blocked_axes(self) -> tuple[int, ...]:
        return self.base.blocked_axes if is_implicit(self.base) else ()

    @property
    def whole_axes(self) -> int | None:
        # A lookup selects rows of a matrix, which only `b` has, or matrices of a stack.
        whole = self.in_axes
        if self.lead_axes:
            whole = (*self.in_axes, *self.out_axes)
        n = len(whole)
        base: Any = self.base.whole_axes if is_implicit(self.base) else 0
        if base is None or base > n:
            return None
        return n if sorted(whole) == list(range(-n, 0)) else None

    def with_dtype(self, dtype) -> "AbstractLoraArray":
        return self.replace(base=self.base.astype(dtype))

    def scale_parts(self, factor: Shaped[Array, "..."], fn: Callable) -> Any:
        """Scale the base, and the part of the adapter with the axes of the factor."""
        varies = {axis for axis, n in enumerate(factor.shape) if n > 1}
        for name in ("b", "a"):
            axes = self.factors[name]
            if varies <= set(axes):
                break
        else:
            return NotImplemented
        base = plain.scaled(self.base, factor, fn)
        if base is NotImplemented:
            return NotImplemented
        kept = [axis for axis in axes if axis is not None]
        others = [axis for axis in range(self.ndim) if axis not in kept]
        sizes = [1 if axis is None else factor.shape[axis] for axis in axes]
        factor = jnp.transpose(factor, (*kept, *others)).reshape(sizes)
        part = plain.scaled(getattr(self, name), factor, fn)
        return self.replace(base=base, **{name: part})
