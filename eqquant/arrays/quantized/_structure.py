"""The fields of a quantized array, and its structural operations, which are exact."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int8, Shaped, UInt8

from ..._jax import parts_of
from ...formats import (
    float_scales,
    Format,
    gather_scales,
    num_bytes,
    num_codes,
    QuantizedOffsets,
    scales_split,
    ShortScales,
    slice_scales,
)
from ...kernels import Compute
from ...primitives import Plan
from .._operators import ArrayOperators


class AbstractQuantizedArray(ArrayOperators):
    """The fields of a [`eqquant.QuantizedArray`][], and what moves them about."""

    codes: UInt8[Array, "*lead packed"] | Int8[Array, "*lead packed"]
    scales: Float[Array, "*lead blocks"] | ShortScales
    format: Format = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)
    axes: tuple[int, ...] = eqx.field(static=True)
    inner: tuple[int, ...] = eqx.field(static=True)
    padding: int = eqx.field(static=True)
    offsets: Float[Array, "*lead blocks"] | QuantizedOffsets | None = None
    plan: Plan | None = eqx.field(static=True, default=None, metadata={"saved": False})
    compute: Compute = eqx.field(
        static=True, default=Compute(), metadata={"saved": False}
    )

    #
    # What it stands for
    #

    @property
    def ndim(self) -> int:
        return self.codes.ndim - 1 + len(self.axes)

    @property
    def float_parts(self) -> tuple[Any, Any]:
        """Scales, and offsets or None, as arrays of floats."""
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
        """The other axes: those that codes and scales share."""
        blocked = self.blocked_axes
        return tuple(axis for axis in range(self.ndim) if axis not in blocked)

    #
    # Structure: exact, on the components; NotImplemented where that is not possible.
    # `_on_lead` is the whole mechanism: an operation that leaves the blocked axes whole
    # is the same operation on both components.
    #

    def replace(self, **fields):
        names = [field.name for field in dataclasses.fields(self)]
        return type(self)(**{n: fields.get(n, getattr(self, n)) for n in names})

    def with_static(self, **static: Any) -> Any:
        """Replace static fields. The parts may be of any kind, such as abstract
        arrays."""
        new = object.__new__(type(self))
        for field in dataclasses.fields(self):
            value = static.get(field.name, getattr(self, field.name))
            object.__setattr__(new, field.name, value)
        return new

    def with_plan(self, plan: Plan | None) -> Any:
        return self.with_static(plan=plan)

    def _on_lead(self, fn, axes: Sequence[int] | None = None, plan: Any = None):
        """Apply `fn` to all components; `axes` says where, counted from the end, the
        blocked axes then are, and `plan` how the codes are split, if they are."""
        axes = self.axes if axes is None else tuple(axes)
        parts = self.codes, self.scales, self.offsets
        codes, scales, offsets = jax.tree.map(fn, parts)
        new = {"codes": codes, "scales": scales, "offsets": offsets, "axes": axes}
        return self.replace(**new, plan=self._plan(plan))

    def _plan(self, fn: Callable[[Plan], Plan] | None) -> Plan | None:
        return self.plan if fn is None or self.plan is None else fn(self.plan)

    def _lead_index(self, axis: int) -> int:
        return self.lead_axes.index(axis)

    def permute(self, permutation: Sequence[int]) -> "AbstractQuantizedArray":
        blocked = [permutation.index(axis) - self.ndim for axis in self.blocked_axes]
        lead = [self._lead_index(i) for i in permutation if i in self.lead_axes]
        if lead == list(range(len(lead))):  # Free: only the blocked axis moves.
            return self.replace(axes=tuple(blocked))
        order = *lead, len(lead)
        return self._on_lead(
            lambda a: jnp.transpose(a, order), blocked, lambda p: p.permuted(order)
        )

    def with_dtype(self, dtype) -> "AbstractQuantizedArray":
        return self.replace(dtype=jnp.dtype(dtype))

    def with_shape(self, shape: Sequence[int]) -> Any:
        """Where the blocked axes stay whole."""
        shape, old = tuple(shape), self.shape
        # Find each blocked axis in the new shape: as many elements before and after it.
        # Of several axes of one element the last, as others are split off at the front.
        where: dict[int, int] = {}
        stop = len(shape)
        for axis in sorted(self.blocked_axes, reverse=True):
            before = math.prod(old[:axis])
            for new in reversed(range(stop)):
                if shape[new] == old[axis] and math.prod(shape[:new]) == before:
                    where[axis] = stop = new
                    break
            else:
                return NotImplemented
        lead = [n for i, n in enumerate(shape) if i not in where.values()]
        axes = [where[axis] - len(shape) for axis in self.blocked_axes]
        if 0 in shape and math.prod(lead) != math.prod(self.codes.shape[:-1]):
            return NotImplemented
        last = self.codes.shape[-1]
        return self._on_lead(
            lambda a: a.reshape(*lead, a.shape[-1]),
            axes,
            lambda p: p.reshaped(self.codes.shape, (*lead, last)),
        )

    def broadcast_in_dim(self, shape: Sequence[int], dimensions: Sequence[int]) -> Any:
        new = [dimensions[axis] for axis in self.blocked_axes]
        old = self.shape
        if any(shape[dimensions[axis]] != old[axis] for axis in self.blocked_axes):
            return NotImplemented
        lead = [i for i in range(len(shape)) if i not in new]
        onto = [lead.index(dimensions[axis]) for axis in self.lead_axes]

        def broadcast(a):
            to = (*(shape[i] for i in lead), a.shape[-1])
            return lax.broadcast_in_dim(a, to, (*onto, len(lead)))

        kept = {axis: i for i, axis in enumerate(onto)}
        picked = *(kept.get(i) for i in range(len(lead))), len(onto)
        return self._on_lead(
            broadcast,
            [i - len(shape) for i in new],
            lambda p: p.picked(len(onto) + 1, picked),
        )

    def slice(
        self,
        start: Sequence[int],
        limit: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> Any:
        """Along the blocked axis only between blocks."""
        strides = tuple(strides or (1,) * self.ndim)
        out = self
        for axis in self.blocked_axes:
            if (start[axis], limit[axis], strides[axis]) != (0, self.shape[axis], 1):
                out = self._slice_blocks(start[axis], limit[axis], strides[axis])
                if out is NotImplemented:
                    return NotImplemented
        lead = self.lead_axes

        def slice_lead(a):
            return lax.slice(
                a,
                (*(start[i] for i in lead), 0),
                (*(limit[i] for i in lead), a.shape[-1]),
                (*(strides[i] for i in lead), 1),
            )

        return out._on_lead(slice_lead)

    def _slice_blocks(self, start: int, limit: int, stride: int):
        """A part of the only blocked axis that begins and ends between blocks."""
        if len(self.axes) > 1 or stride != 1 or limit <= start:
            return NotImplemented
        bits, unit = self.format.bits, self.format.group
        blocks = self.scales.shape[-1]
        stored = num_codes(self.codes.shape[-1], bits)
        if blocks != 1 or self.format.block_size is not None:
            unit = math.lcm(unit, stored // blocks)
        at_end = limit == self.shape[self.blocked_axes[-1]]
        if start % unit or (limit % unit and not at_end):
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

    def dynamic_slice(self, start: Sequence[Any], sizes: Sequence[int]) -> Any:
        if any(sizes[axis] != self.shape[axis] for axis in self.blocked_axes):
            return NotImplemented
        lead = self.lead_axes

        starts = [jnp.asarray(i) for i in (*(start[i] for i in lead), 0)]
        dtype = jnp.result_type(*starts)
        starts = [i.astype(dtype) for i in starts]

        def slice_lead(a):
            whole = (*(sizes[i] for i in lead), a.shape[-1])
            return lax.dynamic_slice(a, starts, whole)

        return self._on_lead(slice_lead)

    def reverse(self, dimensions: Sequence[int]) -> Any:
        if any(axis in self.blocked_axes for axis in dimensions):
            return NotImplemented
        lead = [self._lead_index(axis) for axis in dimensions]
        return self._on_lead(lambda a: lax.rev(a, lead))

    def drop_axes(self, dimensions: Sequence[int]) -> "AbstractQuantizedArray":
        left = [i for i in range(self.ndim) if i not in dimensions]
        axes = [left.index(axis) - len(left) for axis in self.blocked_axes]
        lead = [self._lead_index(axis) for axis in dimensions]
        kept = [i for i in range(self.codes.ndim) if i not in lead]
        return self._on_lead(
            lambda a: lax.squeeze(a, lead),
            axes,
            lambda p: p.picked(self.codes.ndim, kept),
        )

    @property
    def whole_axes(self) -> int | None:
        n = len(self.axes)
        return n if sorted(self.axes) == list(range(-n, 0)) else None

    def gather(self, fn: Callable[[Array, Any], Array], fill: Any = None) -> Any:
        scales = gather_scales(fn, self.scales, fill)
        offsets = self.offsets
        if offsets is not None:
            offsets = gather_scales(fn, offsets, fill)
        codes = fn(self.codes, None)
        # What is looked up may be any of the rows.
        lookup = lambda p: p.picked(
            self.codes.ndim, [*[None] * (codes.ndim - 1), self.codes.ndim - 1]
        )
        new = {"codes": codes, "scales": scales, "offsets": offsets}
        return self.replace(**new, plan=self._plan(lookup))

    def concatenate(self, others: Sequence["AbstractQuantizedArray"], dimension: int):
        if dimension in self.blocked_axes:
            return NotImplemented
        lead = self._lead_index(dimension)
        return jax.tree.map(lambda *parts: lax.concatenate(parts, lead), self, *others)

    def scale_parts(self, factor: Shaped[Array, "..."], fn: Callable) -> Any:
        """On scales and offsets: in float32 or more, as a product may not fit into
        less."""
        if any(factor.shape[axis] != 1 for axis in self.blocked_axes):
            return NotImplemented
        lead = self.lead_axes
        factor = jnp.transpose(factor, (*lead, *self.blocked_axes))
        factor = factor.reshape(*factor.shape[: len(lead)], 1)
        dtype = jnp.promote_types(self.scales.dtype, jnp.float32)
        scales = float_scales(self.scales).astype(dtype)
        factor = jnp.broadcast_to(factor.astype(dtype), scales.shape)
        offsets = self.offsets
        if offsets is not None:
            offsets = fn(float_scales(offsets).astype(dtype), factor)
        return self.replace(scales=fn(scales, factor), offsets=offsets)

    def power(self, exponent: int) -> Any:
        """On the scales, where an odd power leaves each level what it is. They are
        rounded first, as decoded values are: the result is the same, bit for bit."""
        if not self.format.unit_levels or exponent < 1 or exponent % 2 == 0:
            return super().power(exponent)
        if exponent == 1:
            return self
        wide = jnp.promote_types(self.scales.dtype, jnp.float32)
        scales = float_scales(self.scales).astype(self.dtype)
        return self.replace(scales=lax.integer_pow(scales, exponent).astype(wide))

    def split_specs(self, spec: PartitionSpec, mesh) -> Any:
        """Where each device gets whole groups of codes and whole blocks."""
        entries = [*spec, *[None] * (self.ndim - len(spec))]
        lead = [entries[axis] for axis in self.lead_axes]
        first, *others = (entries[axis] for axis in self.blocked_axes)
        if any(entry is not None for entry in others):
            return NotImplemented
        if first is not None and (self.padding or self.inner):
            return NotImplemented
        parts = parts_of(mesh, first)
        group_bytes = num_bytes(self.format.group, self.format.bits)
        if self.codes.shape[-1] % (parts * group_bytes):
            return NotImplemented
        if not scales_split(self.scales, parts):
            return NotImplemented
        # What there is one of in a row is not split; codes are, even so.
        others = jax.tree.leaves((self.scales, self.offsets))
        whole = [False, *(a.shape[-1] == 1 for a in others)]
        specs = [PartitionSpec(*lead, None if one else first) for one in whole]
        return jax.tree.unflatten(jax.tree.structure(self), specs)

    def unflatten(self):
        """The same array with only the last of several blocked axes blocked, which
        needs blocks that do not cross it."""
        *others, last = self.blocked_axes
        if not others:
            return self
        bits = self.format.bits
        stored = num_codes(self.codes.shape[-1], bits)
        shape = self.shape
        size, blocks = shape[last], self.scales.shape[-1]
        block = stored // blocks if blocks else 0
        shared = blocks == 1 and self.format.block_size is None
        unit = self.format.group if shared else math.lcm(self.format.group, block)
        if self.padding or not size or size % unit or others != sorted(others):
            return NotImplemented
        # The axes that are no longer blocked go last among the leading ones, then to
        # where the shape has them.
        lead = self.codes.shape[:-1]
        new = tuple(shape[axis] for axis in others)
        codes = self.codes.reshape(*lead, *new, num_bytes(size, bits))

        def each(part):
            if not shared:
                return part.reshape(*lead, *new, size // block)
            part = part.reshape(*lead, *(1 for _ in new), 1)
            return jnp.broadcast_to(part, (*lead, *new, 1))

        scales, offsets = jax.tree.map(each, self.float_parts)
        now = [*self.lead_axes, *others]
        order = sorted(range(len(now)), key=now.__getitem__)
        out = self.replace(codes=codes, scales=scales, offsets=offsets)
        plan = self._plan(lambda p: p.reshaped(self.codes.shape, codes.shape))
        out = out.replace(axes=self.axes[-1:], inner=(), plan=plan)
        order = *order, len(order)
        return out._on_lead(
            lambda a: jnp.transpose(a, order), plan=lambda p: p.permuted(order)
        )
