"""The fields of a quantized array, and its structural operations."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int8, Shaped, UInt8

from ..._jax import wide_dtype
from ...formats import (
    float_scales,
    Format,
    num_bytes,
    num_codes,
    problems_of,
    scales_split,
    ShortScales,
    slice_scales,
)
from ...kernels import Compute
from .._axes import Operation, Role, Slice
from .._matrices import inverse_order, other_axes, problems_of_axes
from .._operators import ArrayOperators
from .._partition import PartitionedCodes
from .._views import Viewable
from ._mapped import CheckedAxes


class AbstractQuantizedArray(Viewable, PartitionedCodes, ArrayOperators):
    """The fields of a [`eqquant.QuantizedArray`][], and their axes."""

    roles: ClassVar[Mapping[str, Role]] = {"axes": "whole"}
    part_types: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "scales": (ShortScales,),
        "offsets": (type(None), ShortScales),
    }

    codes: UInt8[Array, "*lead packed"] | Int8[Array, "*lead packed"]
    scales: Float[Array, "*lead blocks"] | ShortScales
    format: Format = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)
    axes: tuple[int, ...] = eqx.field(static=True)
    inner: tuple[int, ...] = eqx.field(static=True)
    padding: int = eqx.field(static=True)
    offsets: Float[Array, "*lead blocks"] | ShortScales | None = None
    compute: Compute = eqx.field(
        static=True, default=Compute(), metadata={"saved": False}
    )

    #
    # Shape and dtype
    #

    @property
    def ndim(self) -> int:
        return self.codes.ndim - 1 + len(self.axes)

    @property
    def float_parts(self) -> tuple[Any, Any]:
        """Scales and offsets (or None) as floating-point arrays."""
        offsets = self.offsets
        offsets = None if offsets is None else float_scales(offsets)
        return float_scales(self.scales), offsets

    @property
    def is_whole(self) -> bool:
        return hasattr(self.codes, "shape") and hasattr(self.scales, "shape")

    @property
    def shape(self) -> tuple[int, ...]:
        stored = num_codes(self.codes.shape[-1], self.format.bits)
        inner = math.prod(self.inner)
        if min(self.axes) < -self.ndim:
            raise ValueError(
                f"the codes have {self.codes.ndim} axes, too few for a quantized array "
                f"with axes={self.axes}. `lax.scan` maps the first axis of codes and "
                "scales, in which the blocked axis is last. To map the first axis of "
                "the array, wrap the function that scans: `eqquant.quaxify(fn)`."
            )
        outer = (stored - self.padding) // inner if inner else 0
        shape: list[Any] = [None] * self.ndim
        for axis, size in zip(self.axes, (outer, *self.inner), strict=True):
            shape[axis] = size
        lead = iter(self.codes.shape[:-1])
        return tuple(next(lead) if size is None else size for size in shape)

    @property
    def blocked_axes(self) -> tuple[int, ...]:
        """The blocked axes, counted from the front, in the order of storage."""
        return tuple(axis + self.ndim for axis in self.axes)

    @property
    def lead_axes(self) -> tuple[int, ...]:
        """The leading axes, which codes and scales share."""
        return other_axes(self.ndim, self.axes)

    def problems(self) -> Iterator[str | Exception]:
        yield from super().problems()
        if not jnp.issubdtype(self.dtype, jnp.floating):
            yield f"dtype must be floating point, got {self.dtype}."
        if not self.codes.ndim:
            yield "codes must have at least one axis."
        if not self.axes:
            yield "axes must name at least one blocked axis."
        yield from problems_of_axes(self.axes, self.ndim)
        count = len(self.axes) - 1
        is_size = lambda n: type(n) is int and n >= 0
        if len(self.inner) != count or not all(map(is_size, self.inner)):
            yield f"inner must have {count} sizes for {self.axes}, got {self.inner}."
        stored = num_codes(self.codes.shape[-1], self.format.bits)
        if type(self.padding) is not int or not 0 <= self.padding <= stored:
            yield f"padding must be from 0 to {stored}, got {self.padding}."
        size, inner = stored - self.padding, math.prod(self.inner)
        if size % inner if inner else size:
            yield f"inner must divide the {size} values of a row, got {self.inner}."
        parts = self.codes, self.scales, self.offsets
        yield from problems_of(self.format, *parts, size=size, exact=False)

    #
    # Structure
    #

    def with_static(self, **static: Any) -> Any:
        """Replace static fields. The parts may be of any kind, such as abstract
        arrays."""
        new = object.__new__(type(self))
        for field in dataclasses.fields(self):
            value = static.get(field.name, getattr(self, field.name))
            object.__setattr__(new, field.name, value)
        object.__setattr__(new, "_slot", self.note)
        return new

    @property
    def stacked_parts(self) -> tuple[Any, Any, Any]:
        return self.codes, self.scales, self.offsets

    def axes_of_parts(self, ndim: int, groups: Mapping[str, Sequence[int]]) -> Any:
        axes = (*other_axes(ndim, groups["axes"]), ...)
        return {name: axes for name in ("codes", "scales", "offsets")}

    @property
    def whole_axes(self) -> int | None:
        n = len(self.axes)
        return n if sorted(self.axes) == list(range(-n, 0)) else None

    def move(self, operation: Operation) -> Any:
        """Slice the blocked axis only between blocks."""
        if isinstance(operation, Slice):
            for axis in self.blocked_axes:
                if operation.cuts(axis):
                    sliced = self._slice_blocks(operation, axis)
                    if sliced is NotImplemented:
                        return NotImplemented
                    return sliced.move(operation.after(axis))
        return super().move(operation)

    def _slice_blocks(self, cut: Slice, axis: int):
        """Slice the only blocked axis from the start of a block to the end of one."""
        start, limit = cut.start[axis], cut.limit[axis]
        if len(self.axes) > 1 or cut.strides[axis] != 1 or limit <= start:
            return NotImplemented
        bits, step = self.format.bits, self.format.group
        blocks = self.scales.shape[-1]
        stored = num_codes(self.codes.shape[-1], bits)
        if blocks != 1 or self.format.block_size is not None:
            step = math.lcm(step, stored // blocks)
        at_end = limit == self.shape[axis]
        if start % step or (limit % step and not at_end):
            return NotImplemented
        stop = stored if at_end else limit
        scales, offsets = self.scales, self.offsets
        if blocks > 1:
            block = stored // blocks
            scales = slice_scales(scales, start // block, stop // block)
            if scales is NotImplemented:
                return NotImplemented
            if offsets is not None:
                offsets = slice_scales(offsets, start // block, stop // block)
        return self.replace(
            codes=self.codes[..., num_bytes(start, bits) : num_bytes(stop, bits)],
            scales=scales,
            offsets=offsets,
            padding=stop - limit,
        )

    def with_dtype(self, dtype) -> "AbstractQuantizedArray":
        return self.with_static(dtype=jnp.dtype(dtype))

    def scale_parts(self, factor: Shaped[Array, "..."], fn: Callable) -> Any:
        """Scale the scales and offsets, in at least float32 to avoid overflow."""
        if any(factor.shape[axis] != 1 for axis in self.blocked_axes):
            return NotImplemented
        lead = self.lead_axes
        factor = jnp.transpose(factor, (*lead, *self.blocked_axes))
        factor = factor.reshape(*factor.shape[: len(lead)], 1)
        dtype = wide_dtype(self.scales.dtype)
        scales = float_scales(self.scales).astype(dtype)
        factor = jnp.broadcast_to(factor.astype(dtype), scales.shape)
        offsets = self.offsets
        if offsets is not None:
            offsets = fn(float_scales(offsets).astype(dtype), factor)
        return self.replace(scales=fn(scales, factor), offsets=offsets)

    def power(self, exponent: int) -> Any:
        """Raise the scales to an odd power, if the levels are -1, 0 and 1.

        Scales are rounded first, like decoded values, so that the result is equal bit
        for bit.
        """
        if not self.format.unit_levels or exponent < 1 or exponent % 2 == 0:
            return super().power(exponent)
        if exponent == 1:
            return self
        wide = wide_dtype(self.scales.dtype)
        scales = float_scales(self.scales).astype(self.dtype)
        return self.replace(scales=lax.integer_pow(scales, exponent).astype(wide))

    def can_split(self, axis: int, parts: int) -> bool:
        """Return whether each part of an axis has whole groups and blocks."""
        if parts == 1 or axis not in self.blocked_axes:
            return True
        if self.padding or self.inner:
            return False
        group_bytes = num_bytes(self.format.group, self.format.bits)
        even = self.codes.shape[-1] % (parts * group_bytes) == 0
        return even and scales_split(self.scales, parts)

    def can_join(self, axis: int) -> bool:
        """Return whether rows can be joined: they have whole blocks, and not one scale
        per row."""
        if axis not in self.blocked_axes:
            return True
        whole = not self.padding and not self.inner
        is_short = isinstance(self.scales, ShortScales)  # Some parts are per row.
        return whole and not is_short and self.scales.shape[-1] > 1

    def unflatten(self):
        """Return the same array with only the last of several blocked axes blocked.

        Blocks must not cross this axis.
        """
        *others, last = self.blocked_axes
        if not others:
            return self
        bits = self.format.bits
        stored = num_codes(self.codes.shape[-1], bits)
        shape = self.shape
        size, blocks = shape[last], self.scales.shape[-1]
        block = stored // blocks if blocks else 0
        shared = blocks == 1 and self.format.block_size is None
        step = self.format.group if shared else math.lcm(self.format.group, block)
        if self.padding or not size or size % step or others != sorted(others):
            return NotImplemented
        # Axes that are no longer blocked become the last leading axes, and then move to
        # their positions in the shape.
        lead = self.codes.shape[:-1]
        new = tuple(shape[axis] for axis in others)
        codes = self.codes.reshape(*lead, *new, num_bytes(size, bits))

        def each(part):
            if not shared:
                return part.reshape(*lead, *new, size // block)
            part = part.reshape(*lead, *(1 for _ in new), 1)
            return jnp.broadcast_to(part, (*lead, *new, 1))

        now = [*self.lead_axes, *others]
        order = *inverse_order(now), len(now)
        parts = codes, *jax.tree.map(each, self.float_parts)
        parts = jax.tree.map(lambda a: jnp.transpose(a, order), parts)
        out = self.replace(
            **dict(zip(("codes", "scales", "offsets"), parts, strict=True)),
            axes=self.axes[-1:],
            inner=(),
        )
        return out.split_like(self, codes.shape, order)


setattr(AbstractQuantizedArray, "axes", CheckedAxes())  # noqa: B010
