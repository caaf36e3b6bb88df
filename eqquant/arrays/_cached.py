"""Caches of tokens, with the first and the last tokens in floating point."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import wadler_lindig as wl
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from . import _plain as plain
from ._axes import Role
from ._contraction import Contraction
from ._implicit import ImplicitArray, is_implicit
from ._matrices import other_axes
from ._operators import ArrayOperators
from ._slots import (
    blocks_of,
    from_slots,
    in_slots,
    last_written,
    read_slots,
    to_slots,
    update_blocks,
    write_slots,
)
from .quantized import QuantizedArray


class CachedArray(ArrayOperators):
    """Keys or values of tokens: a quantized array, and some tokens in other parts.

    The first tokens (attention sinks, arXiv 2309.17453) and the last tokens stay in
    floating point. Codes of a layer with a sliding window are kept in a ring buffer for
    the last tokens, without a quantized array of all tokens. Keys may have scales per
    channel over groups of tokens (KIVI, arXiv 2402.02750). Each write quantizes its
    groups again, from the tokens in floating point.

    Make one with [`eqquant.trees.quantize_cache`][], not by calling the class. It
    supports `lax.dynamic_update_slice` and `.at[...].set(...)`, products over the head
    size (scores) or over tokens (values), and structural operations that keep all
    tokens. A ring buffer, and scales per channel, need the written tokens to be one
    slice.

    !!! Example

        ```python
        import eqquant
        import jax.numpy as jnp

        keys = eqquant.trees.quantize_cache(jnp.ones((4, 512, 64)), "int4", recent=64)
        assert isinstance(keys, eqquant.arrays.CachedArray)
        assert keys.shape == (4, 512, 64) and keys.recent.shape == (4, 64, 64)
        ```

    **Fields:**

    - `base`: the quantized array of all tokens, or None in a ring buffer.
    - `recent`: `(*lead, slots, size)`: the last tokens, floating point or quantized.
        The token at position `p` has slot `p % slots`.
    - `positions`: `(*lead, slots)`: the position of the token in each slot. Other
        positions, from `capacity` on, mean that the slot is empty.
    - `first`: `(*lead, sinks, size)`: the first tokens, or None.
    - `axes`: the axes of tokens and of the head size, counted from the end.
    - `capacity`: the number of tokens.
    - `longest`: the number of tokens that a write may have at most in a ring buffer;
        None otherwise.
    """

    roles: ClassVar[Mapping[str, Role]] = {"axes": "whole"}
    part_types: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "base": (ImplicitArray, type(None)),
        "recent": (ImplicitArray,),
        "first": (type(None),),
    }

    base: Any
    recent: Any
    positions: Int[Array, "*lead slots"]
    first: Float[Array, "*lead sinks size"] | None
    axes: tuple[int, int] = eqx.field(static=True)
    capacity: int = eqx.field(static=True)
    longest: int | None = eqx.field(static=True, default=None)

    #
    # Shape and dtype
    #

    @property
    def ndim(self) -> int:
        return self.positions.ndim + 1

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = (*self.positions.shape[:-1], self.capacity, self.recent.shape[-1])
        shape = [0] * self.ndim
        for axis, size in zip(self._stored, sizes, strict=True):
            shape[axis] = size
        return tuple(shape)

    @property
    def dtype(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.recent.dtype

    @property
    def sinks(self) -> int:
        return 0 if self.first is None else self.first.shape[-2]

    @property
    def group(self) -> int | None:
        """The number of tokens that share a scale per channel, if they do."""
        base = self.base
        if isinstance(base, QuantizedArray) and base.axes == self.axes[:1]:
            return self.capacity // base.scales.shape[-1]
        return None

    @property
    def is_whole(self) -> bool:
        parts = [x for x in (self.base, self.recent) if isinstance(x, ImplicitArray)]
        if not all(part.is_whole for part in parts):
            return False
        return all(hasattr(x, "shape") for x in (self.recent, self.positions))

    @property
    def lead_axes(self) -> tuple[int, ...]:
        return other_axes(self.ndim, self.axes)

    @property
    def _stored(self) -> tuple[int, ...]:
        """The axes in the order of `recent`: tokens and the head size are last."""
        return (*self.lead_axes, *self.blocked_axes)

    def problems(self) -> Iterator[str | Exception]:
        yield from super().problems()
        if self.base is not None and self.base.shape != self.shape:
            yield f"base must have the shape {self.shape}, got {self.base.shape}."
        if self.recent.shape[:-1] != self.positions.shape:
            yield (
                f"positions must have the shape {self.recent.shape[:-1]}, got "
                f"{self.positions.shape}."
            )

    def dequantize(self) -> Float[Array, "..."]:
        """Return all tokens in floating point, and zeros for tokens outside of a ring
        buffer."""
        self.check_whole()
        decode = lambda x: x.dequantize() if is_implicit(x) else x
        if self.base is None:
            out = jnp.zeros([self.shape[i] for i in self._stored], self.dtype)
        else:
            out = jnp.transpose(decode(self.base), self._stored)
        has_slot = in_slots(self.positions, self.capacity)
        swap = lambda x: jnp.swapaxes(x, -1, -2)
        expand = lambda x: jnp.expand_dims(x, -3)
        out = swap(from_slots(swap(out), swap(decode(self.recent)), expand(has_slot)))
        if self.first is not None:
            out = lax.dynamic_update_slice(out, self.first, (0,) * out.ndim)
        return jnp.moveaxis(out, (-2, -1), self.axes)

    #
    # Structure
    #

    @property
    def blocked_axes(self) -> tuple[int, ...]:
        return tuple(axis + self.ndim for axis in self.axes)

    @property
    def whole_axes(self) -> int | None:
        return 2 if sorted(self.axes) == [-2, -1] else None

    def axes_of_parts(self, ndim: int, groups: Mapping[str, Sequence[int]]) -> Any:
        parts = (*other_axes(ndim, groups["axes"]), ...)
        stored = {name: parts for name in ("recent", "positions", "first")}
        return {"base": tuple(range(ndim)), **stored}

    def can_split(self, axis: int, parts: int) -> bool:
        """Return whether the axis can be split over a mesh: not tokens or the head."""
        return parts == 1 or axis not in self.blocked_axes

    def with_dtype(self, dtype) -> "CachedArray":
        parts = {name: getattr(self, name) for name in ("base", "recent", "first")}
        cast = lambda x: x if x is None else x.astype(dtype)
        return self.replace(**{name: cast(x) for name, x in parts.items()})

    def scale_parts(self, factor: Shaped[Array, "..."], fn: Callable) -> Any:
        return NotImplemented

    #
    # Writes
    #

    def update(self, rows: Shaped[Array, "..."], start: Sequence[Any]) -> Any:
        token, size = self.blocked_axes
        tokens = rows.shape[token]
        if rows.shape[size] != self.shape[size] or not rows.size:
            return NotImplemented
        self.check_whole()
        if self.longest is not None and tokens > self.longest:
            raise ValueError(
                f"A write of {tokens} tokens does not fit into the ring buffer of this "
                f"cache, which is made for writes of {self.longest} tokens. Pass "
                f"longest={tokens} to quantize_cache, or write fewer tokens at once."
            )
        rows = rows.astype(self.dtype)
        start = [
            jnp.clip(i, 0, full - part).astype(jnp.int32)
            for i, full, part in zip(
                map(jnp.asarray, start), self.shape, rows.shape, strict=True
            )
        ]
        first = start[token]
        lead = tuple(start[axis] for axis in self.lead_axes)
        base = self.base
        if self.group is not None:
            base = self._update_groups(rows, start)
        elif base is not None:
            base = base.update(rows, start)
        if base is NotImplemented:
            return NotImplemented
        stored = jnp.transpose(rows, self._stored)
        place = lambda old, new: write_slots(old, new, lead, first)
        if is_implicit(self.recent):
            recent = self.recent.put(stored, place)
        else:
            recent = place(self.recent, stored)
        at = first + jnp.arange(tokens, dtype=jnp.int32)
        positions = place(self.positions, jnp.broadcast_to(at, stored.shape[:-1]))
        sinks = self.first if self.first is None else self._sinks(stored, lead, first)
        return self.replace(base=base, recent=recent, positions=positions, first=sinks)

    @property
    def updates_slices(self) -> bool:
        return True

    def rows_to_put(self) -> tuple[Any, tuple[int, ...], int | None]:
        return self.permute(self._stored), self._stored, 1

    def put(
        self, rows: Shaped[Array, "..."], fn: Callable[[Array, Array], Array]
    ) -> Any:
        """Replace any tokens. The axes must be those of `rows_to_put`."""
        if self.base is None or self.group is not None:
            return NotImplemented
        if rows.shape[-1] != self.shape[-1] or not rows.size:
            return NotImplemented
        self.check_whole()
        rows = rows.astype(self.dtype)
        base = self.base.put(rows, fn)
        if base is NotImplemented:
            return NotImplemented
        # `fn` puts the numbers of rows in their places. Slots and sinks read them.
        numbers = jnp.arange(rows.size // rows.shape[-1], dtype=jnp.int32)
        none = jnp.full((*self.shape[:-1], 1), -1, jnp.int32)
        numbers = fn(none, numbers.reshape(*rows.shape[:-1], 1))[..., 0]
        rows = rows.reshape(-1, rows.shape[-1])
        swap = lambda old, n: jnp.where(n[..., None] < 0, old, rows[n])
        found, at = last_written(numbers, self.positions.shape[-1])
        first = self.first
        return self.replace(
            base=base,
            recent=swap(self.recent, found),
            positions=jnp.where(found < 0, self.positions, at),
            first=first if first is None else swap(first, numbers[..., : self.sinks]),
        )

    def _sinks(self, rows, lead, first):
        """Replace those first tokens that are written."""
        assert self.first is not None
        sizes = (*rows.shape[:-2], *self.first.shape[-2:])
        zero = jnp.zeros((), jnp.int32)
        start = (*lead, zero, zero)
        old = lax.dynamic_slice(self.first, start, sizes)
        source = jnp.arange(self.sinks) - first
        written = (source >= 0) & (source < rows.shape[-2])
        rows = jnp.take(rows, jnp.clip(source, 0, rows.shape[-2] - 1), -2)
        new = jnp.where(written[:, None], rows, old)
        return lax.dynamic_update_slice(self.first, new, start)

    def _update_groups(self, rows, start):
        """Quantize the groups of new tokens. Their other tokens come from slots, or
        else from codes."""
        base, group, token = self.base, self.group, self.blocked_axes[0]
        assert group is not None
        tokens, total = rows.shape[token], self.capacity // group
        count = min(total, (tokens + 2 * group - 2) // group)
        block = jnp.minimum(start[token] // group, total - count)
        lead = tuple(start[axis] for axis in base.lead_axes)
        sizes = (*(rows.shape[axis] for axis in base.lead_axes), count)
        cut = lambda part: blocks_of(part, sizes, lead, block, total)
        groups = jax.tree.map(cut, base)

        # The axes below are leading axes, tokens, the head size.
        places = tuple(start[axis] for axis in self.lead_axes)
        at = group * block + jnp.arange(count * group, dtype=jnp.int32)
        sizes = tuple(rows.shape[axis] for axis in self.lead_axes)
        recent, positions = (
            read_slots(part, places, sizes, at)
            for part in (self.recent, self.positions)
        )
        old = jnp.transpose(groups.dequantize(), self._stored)
        old = jnp.where((positions == at)[..., None], recent, old)
        source = at - start[token]
        new = jnp.transpose(rows, self._stored)
        new = jnp.take(new, jnp.clip(source, 0, tokens - 1), -2)
        written = (source >= 0) & (source < tokens)
        new = jnp.where(written[:, None], new, old)
        new = groups.put(jnp.moveaxis(new, (-2, -1), self.axes), lambda _, new: new)
        put = lambda part, new: update_blocks(part, new, lead, block, total)
        return jax.tree.map(put, base, new)

    #
    # Products
    #

    @property
    def rounds_activations(self) -> bool:
        return self.base is not None and self.base.rounds_activations

    def contract(self, x, contraction: Contraction) -> Any:
        self.check_whole()
        over, batch = contraction.over, contraction.batch
        out_dtype = contraction.result_dtype(self, x)
        if not jnp.issubdtype(out_dtype, jnp.floating) or len(over) != 1:
            return NotImplemented
        (axis, x_axis) = over[0]
        token, size = self.blocked_axes
        if token in [a for a, _ in batch]:
            raise ValueError(
                f"A product pairs axis {self.axes[0]} of a cache of shape {self.shape} "
                "with an axis of its other operand, but this axis counts tokens. If "
                "another axis does, pass `tokens` to quantize_cache."
            )
        if size in [a for a, _ in batch]:
            return NotImplemented
        how = contraction.precision, out_dtype, contraction.out_sharding
        if axis == size:
            return self._scores(x, over, batch, how)
        if axis == token and len(batch) == self.ndim - 2:
            x = jnp.moveaxis(x, x_axis, -1)
            batch = tuple((a, b - (b > x_axis)) for a, b in batch)
            return self._values(x, batch, how)
        return NotImplemented

    def _place(self, axis: int) -> int:
        """Return the place of an axis in `recent`."""
        return self._stored.index(axis)

    def _scores(self, x, over, batch, how):
        """Multiply by all tokens, then by the tokens in other parts."""
        token, size = self.blocked_axes
        here = lambda pairs: [(self._place(a), b) for a, b in pairs]
        contraction = Contraction(here(over), here(batch), *how)
        slots = lambda part: plain.contract(part, x, contraction)
        near = slots(self.recent)
        batched = [a for a, _ in batch]
        free = other_axes(self.ndim, batched, (size,))
        place = free.index(token) - len(free)
        if self.base is None:
            far = jnp.zeros((*near.shape[:-1], self.capacity), near.dtype)
        else:
            far = self.base.contract(x, Contraction(over, batch, *how))
            if far is NotImplemented:
                return NotImplemented
            far = jnp.moveaxis(far, place, -1)
        others = [a for a in free if a != token]
        order = [self._place(a) for a in (*batched, *others)]
        rows = x.ndim - len(batch) - 1
        positions = jnp.transpose(self.positions, (*order, -1))
        shape = positions.shape
        positions = positions.reshape(
            *shape[: len(batch)], *(1,) * rows, *shape[len(batch) :]
        )
        out = from_slots(far, near, in_slots(positions, self.capacity))
        if self.first is not None:
            # In place. A concatenation would copy the scores, element by element.
            start = (0,) * out.ndim
            out = lax.dynamic_update_slice(out, slots(self.first), start)
        return jnp.moveaxis(out, -1, place)

    def _values(self, x, batch, how):
        """Multiply weights of tokens, the last axis of `x`, by the parts that have the
        tokens."""
        here = [(self._place(a), b) for a, b in batch]
        lead = len(self.lead_axes)
        slots = lambda part, x: plain.contract(
            part, x, Contraction([(lead, x.ndim - 1)], here, *how)
        )
        terms = []
        if self.first is not None:
            terms.append(slots(self.first, x[..., : self.sinks]))
            x = jnp.where(jnp.arange(self.capacity) < self.sinks, 0, x)
        order = sorted(here, key=lambda pair: pair[1])
        positions = jnp.transpose(self.positions, (*(i for i, _ in order), -1))
        axes = [b for _, b in order]
        rows = [i for i in range(x.ndim - 1) if i not in axes]
        positions = jnp.expand_dims(positions, rows)
        x, near = to_slots(x, in_slots(positions, self.capacity))
        terms.append(slots(self.recent, near))
        if self.base is not None:
            over = [(self.blocked_axes[0], x.ndim - 1)]
            out = self.base.contract(x, Contraction(over, batch, *how))
            if out is NotImplemented:
                return NotImplemented
            terms.append(out)
        return sum(terms[1:], terms[0])

    def __pdoc__(self, **kwargs):
        if not self.is_whole:  # A pytree with other leaves, such as specs.
            return wl.TextDoc(f"cached({self.base!r}, {self.recent!r})")
        recent = wl.pdoc(self.recent, **kwargs)
        if self.base is None:
            return wl.TextDoc(f"ring[{self.capacity}](") + recent + wl.TextDoc(")")
        base = wl.pdoc(self.base, **kwargs)
        slots = self.positions.shape[-1]
        inside = f"cached[first={self.sinks}, recent={slots}]("
        return wl.TextDoc(inside) + base + wl.TextDoc(")")
