"""The quantized array."""

import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl
from jax import lax
from jaxtyping import Array, Float, Int8, Shaped, UInt8

from ._indexing import index_array
from ._materialise import materialise
from ._pack import codes_per_byte, unpack
from ._product import matmul
from .formats import Format


class QuantizedArray(eqx.Module):
    """An array stored as codes and scales: `value = level(code) * scale`.

    It is a pytree of exactly two leaves. Both carry the leading axes of the array, and
    the shape is derived from them; so slicing the leaves, stacking them, scanning over
    them or mapping over them gives quantized arrays again.

    Made by [`eqquant.quantize`][] or
    [`eqquant.from_components`][], not by calling the class.

    Without any wrapper it supports `q @ x`, `x @ q`, indexing, `.T`, `.mT`, `.astype`,
    `.reshape` and `.transpose`, which is what `eqx.nn` layers ask of a weight. For
    anything else see [`eqquant.quaxify`][]. It never turns into a plain array behind
    your back: a `jax.numpy` function raises a `TypeError`.

    **Fields:**

    - `codes`: `(*lead, packed)`: one byte or several codes to the byte, along the
        blocked axis, which is last.
    - `scales`: `(*lead, blocks)`.
    - `format`: how to read them.
    - `dtype`: the dtype of the array that they stand for.
    - `axes`: where the blocked axes are in that array, counted from its end.
    - `inner`: the sizes of all the blocked axes but the first.
    - `padding`: how many codes fill the partial last block.
    """

    codes: UInt8[Array, "*lead packed"] | Int8[Array, "*lead packed"]
    scales: Float[Array, "*lead blocks"]
    format: Format = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)
    axes: tuple[int, ...] = eqx.field(static=True)
    inner: tuple[int, ...] = eqx.field(static=True)
    padding: int = eqx.field(static=True)

    # NumPy arrays leave `x @ q` to us.
    __array_ufunc__ = None

    def __array__(self, *args, **kwargs):
        # Otherwise NumPy would put it together row by row, as any sequence.
        raise TypeError(
            f"{self!r} does not turn into an array by itself: use `.dequantize()`."
        )

    #
    # What it stands for
    #

    @property
    def ndim(self) -> int:
        return self.codes.ndim - 1 + len(self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        stored = self.codes.shape[-1] * codes_per_byte(self.format.bits)
        inner = math.prod(self.inner)
        outer = (stored - self.padding) // inner if inner else 0
        shape: list[Any] = [None] * self.ndim
        for axis, size in zip(self.axes, (outer, *self.inner), strict=True):
            shape[axis] = size
        lead = iter(self.codes.shape[:-1])
        return tuple(next(lead) if size is None else size for size in shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return sum(
            math.prod(a.shape) * np.dtype(a.dtype).itemsize
            for a in (self.codes, self.scales)
        )

    @property
    def block_size(self) -> int | None:
        return self.format.block_size

    @property
    def blocked_axes(self) -> tuple[int, ...]:
        """The blocked axes, counted from the front, in the order of storage."""
        return tuple(axis + self.ndim for axis in self.axes)

    @property
    def lead_axes(self) -> tuple[int, ...]:
        """The other axes: those that codes and scales share."""
        blocked = self.blocked_axes
        return tuple(axis for axis in range(self.ndim) if axis not in blocked)

    def dequantize(self) -> Float[Array, "..."]:
        """The array that this one stands for, in floating point."""
        bits, group = self.format.bits, self.format.group
        compute = jnp.promote_types(self.dtype, jnp.float32)
        if self.scales.dtype == jnp.float64:
            compute = jnp.promote_types(compute, jnp.float64)
        *lead, packed = self.codes.shape
        blocks = self.scales.shape[-1]
        size = packed * codes_per_byte(bits)
        levels = self.format.levels(unpack(self.codes, bits, group), compute)
        if size:
            levels = levels.reshape(*lead, blocks, size // blocks)
            levels = levels * self.scales.astype(compute)[..., None]
        values = levels.reshape(*lead, size)[..., : size - self.padding]
        shape = self.shape
        values = values.reshape(*lead, *(shape[axis] for axis in self.blocked_axes))
        stored = (*self.lead_axes, *self.blocked_axes)
        values = jnp.transpose(values, [stored.index(i) for i in range(self.ndim)])
        return values.astype(self.dtype)

    def __pdoc__(self, **kwargs):
        if not hasattr(self.codes, "shape"):  # A pytree of something else.
            parts = f"codes={self.codes!r}, scales={self.scales!r}"
            return wl.TextDoc(f"{self.format.name}({parts})")
        del kwargs
        dtype = self.dtype.name.replace("float", "f")
        shape = ",".join(map(str, self.shape))
        return wl.TextDoc(f"{self.format.name}:{dtype}[{shape}]")

    #
    # Structure: exact, on the components; NotImplemented where that is not possible.
    # `_on_lead` is the whole mechanism: an operation that leaves the blocked axes whole
    # is the same operation on both components.
    #

    def replace(self, **fields) -> "QuantizedArray":
        names = ("codes", "scales", "format", "dtype", "axes", "inner", "padding")
        return QuantizedArray(**{n: fields.get(n, getattr(self, n)) for n in names})

    def _on_lead(self, fn, axes: Sequence[int] | None = None) -> "QuantizedArray":
        """Apply `fn` to both components; `axes` says where, counted from the end, the
        blocked axes then are."""
        axes = self.axes if axes is None else tuple(axes)
        return self.replace(codes=fn(self.codes), scales=fn(self.scales), axes=axes)

    def _lead_index(self, axis: int) -> int:
        return self.lead_axes.index(axis)

    def transpose(self, *axes) -> "QuantizedArray":
        """As `jnp.transpose`: exact, and free where only the blocked axis moves."""
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
        blocked = [permutation.index(axis) - self.ndim for axis in self.blocked_axes]
        lead = [self._lead_index(i) for i in permutation if i in self.lead_axes]
        if lead == list(range(len(lead))):
            return self.replace(axes=tuple(blocked))
        return self._on_lead(lambda a: jnp.transpose(a, (*lead, len(lead))), blocked)

    @property
    def T(self) -> "QuantizedArray":
        return self.transpose()

    @property
    def mT(self) -> "QuantizedArray":
        if self.ndim < 2:
            raise ValueError(f"mT: needs two axes or more, got shape {self.shape}.")
        *lead, i, j = range(self.ndim)
        return self.transpose(*lead, j, i)

    def with_shape(self, shape: Sequence[int]):
        """The same values under another shape that keeps the blocked axes whole."""
        shape, old = tuple(shape), self.shape
        if math.prod(shape) != math.prod(old):
            raise ValueError(f"reshape: cannot reshape {old} into {shape}.")
        # Find each blocked axis in the new shape: as many elements before and after it.
        where: dict[int, int] = {}
        start = 0
        for axis in sorted(self.blocked_axes):
            before = math.prod(old[:axis])
            for new in range(start, len(shape)):
                if shape[new] == old[axis] and math.prod(shape[:new]) == before:
                    where[axis], start = new, new + 1
                    break
            else:
                return NotImplemented
        lead = [n for i, n in enumerate(shape) if i not in where.values()]
        axes = [where[axis] - len(shape) for axis in self.blocked_axes]
        if 0 in shape and math.prod(lead) != math.prod(self.codes.shape[:-1]):
            return NotImplemented
        return self._on_lead(lambda a: a.reshape(*lead, a.shape[-1]), axes)

    def broadcast_in_dim(self, shape: Sequence[int], dimensions: Sequence[int]):
        """As `lax.broadcast_in_dim`."""
        new = [dimensions[axis] for axis in self.blocked_axes]
        old = self.shape
        if any(shape[dimensions[axis]] != old[axis] for axis in self.blocked_axes):
            return NotImplemented
        lead = [i for i in range(len(shape)) if i not in new]
        onto = [lead.index(dimensions[axis]) for axis in self.lead_axes]

        def broadcast(a):
            to = (*(shape[i] for i in lead), a.shape[-1])
            return lax.broadcast_in_dim(a, to, (*onto, len(lead)))

        return self._on_lead(broadcast, [i - len(shape) for i in new])

    def broadcast_to(self, shape: Sequence[int]):
        """As `jnp.broadcast_to`."""
        if tuple(shape) == self.shape:
            return self
        offset = len(shape) - self.ndim
        return self.broadcast_in_dim(shape, range(offset, len(shape)))

    def slice(
        self,
        start: Sequence[int],
        limit: Sequence[int],
        strides: Sequence[int] | None = None,
    ):
        """As `lax.slice`. Along the blocked axis only between blocks."""
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
        per_byte, unit = codes_per_byte(self.format.bits), self.format.group
        blocks = self.scales.shape[-1]
        stored = self.codes.shape[-1] * per_byte
        if blocks != 1 or self.format.block_size is not None:
            unit = math.lcm(unit, stored // blocks)
        at_end = limit == self.shape[self.blocked_axes[-1]]
        if start % unit or (limit % unit and not at_end):
            return NotImplemented
        stop = stored if at_end else limit
        scales = self.scales
        if blocks > 1:
            block = stored // blocks
            scales = scales[..., start // block : stop // block]
        return self.replace(
            codes=self.codes[..., start // per_byte : stop // per_byte],
            scales=scales,
            padding=stop - limit,
        )

    def dynamic_slice(self, start: Sequence[Any], sizes: Sequence[int]):
        """As `lax.dynamic_slice`, with the blocked axes whole."""
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

    def reverse(self, dimensions: Sequence[int]):
        """As `lax.rev`."""
        if any(axis in self.blocked_axes for axis in dimensions):
            return NotImplemented
        lead = [self._lead_index(axis) for axis in dimensions]
        return self._on_lead(lambda a: lax.rev(a, lead))

    def squeeze(self, dimensions: Sequence[int]):
        """As `lax.squeeze`. What is left with fewer than two axes is an activation
        rather than a weight, and comes back in floating point."""
        left = [i for i in range(self.ndim) if i not in dimensions]
        if len(left) < 2 or any(axis in dimensions for axis in self.blocked_axes):
            return jnp.squeeze(self.dequantize(), tuple(dimensions))
        axes = [left.index(axis) - len(left) for axis in self.blocked_axes]
        lead = [self._lead_index(axis) for axis in dimensions]
        return self._on_lead(lambda a: lax.squeeze(a, lead), axes)

    def unflatten(self):
        """The same array with only the last of several blocked axes blocked, which
        needs blocks that do not cross it."""
        *others, last = self.blocked_axes
        if not others:
            return self
        per_byte = codes_per_byte(self.format.bits)
        stored = self.codes.shape[-1] * per_byte
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
        codes = self.codes.reshape(*lead, *new, size // per_byte)
        if shared:
            scales = jnp.broadcast_to(
                self.scales.reshape(*lead, *(1 for _ in new), 1), (*lead, *new, 1)
            )
        else:
            scales = self.scales.reshape(*lead, *new, size // block)
        now = [*self.lead_axes, *others]
        order = sorted(range(len(now)), key=now.__getitem__)
        out = self.replace(codes=codes, scales=scales, axes=self.axes[-1:], inner=())
        return out._on_lead(lambda a: jnp.transpose(a, (*order, len(order))))

    #
    # Operators
    #

    def reshape(self, *shape) -> "QuantizedArray | Float[Array, '...']":
        """As `jnp.reshape`: exact where the blocked axis stays whole; otherwise the
        array is dequantized, with a warning."""
        if len(shape) == 1 and isinstance(shape[0], list | tuple):
            (shape,) = shape
        known = math.prod(n for n in shape if n != -1)
        shape = [self.size // max(known, 1) if n == -1 else n for n in shape]
        out = self.with_shape(shape)
        if out is NotImplemented:
            return materialise(self, "reshape", "warn").reshape(shape)
        return out

    def astype(self, dtype) -> "QuantizedArray | Shaped[Array, '...']":
        """The same codes and scales, standing for an array of another floating-point
        dtype. Any other dtype: a plain array, with a warning."""
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            return materialise(self, f"astype({dtype})", "warn").astype(dtype)
        return self.replace(dtype=dtype)

    def __matmul__(self, other):
        return self._matmul(other, reflected=False)

    def __rmatmul__(self, other):
        return self._matmul(other, reflected=True)

    def _matmul(self, other, reflected):
        if isinstance(other, QuantizedArray):
            small, large = sorted((self, other), key=lambda q: q.size)
            other = materialise(small, "a product of two quantized arrays", "warn")
            return large._matmul(other, reflected=reflected == (large is self))
        if not eqx.is_array(other) and not isinstance(other, np.ndarray):
            return NotImplemented
        other = jnp.asarray(other)
        out = matmul(self, other, reflected=reflected)
        if out is NotImplemented:
            dense = materialise(self, "matmul", "warn")
            return other @ dense if reflected else dense @ other
        return out

    def __getitem__(self, index) -> "QuantizedArray | Float[Array, '...']":
        """As indexing of an array. Rows of a matrix come back in floating point: only
        they are decoded. Everything with two axes or more stays quantized."""
        return index_array(self, index)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of an array without axes.")
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))


def _canonical_axis(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} is out of range for an array of {ndim} axes.")
    return axis % ndim
