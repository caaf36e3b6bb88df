"""What formats with a table of levels share: how a block gets its scale, and offset."""

import functools as ft
from collections.abc import Sequence
from typing import Any, ClassVar, get_args, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from ._format import (
    bound_scales,
    divide_blocks,
    Format,
    max_blocks,
    square,
    sum_blocks,
    true_divide,
)
from ._scales import num_groups, quantize_offsets, quantize_scales, QuantizedOffsets


Fit: TypeAlias = Literal["absmax", "search", "least_squares"]


class _Parts(NamedTuple):
    """Of each block, as stored."""

    scales: Float[Array, "*lead blocks"]
    offsets: Float[Array, "*lead blocks"] | QuantizedOffsets | None


@ft.cache
def _evenly(first: float, last: float, count: int) -> tuple[float, ...]:
    return tuple(first + (last - first) * i / (count - 1) for i in range(count))


class FittedFormat(Format):
    """A format whose scales bring a table of levels to a block.

    A subclass has `table`, the levels in ascending order, and `nearest`. It may have
    fields `fit` and `affine`, and `double_quantization`, for scales that are positive.
    """

    fit: Fit = "absmax"
    affine: bool = False
    double_quantization: bool = False

    # The levels, in ascending order.
    table: ClassVar[Sequence[float]]

    def __post_init__(self):
        super().__post_init__()
        default = jnp.dtype(type(self).scale_dtype)
        if self.double_quantization and self.scale_dtype == default:
            # Scales in 8 bits decode to float32.
            object.__setattr__(self, "scale_dtype", np.dtype("float32"))
        if self.fit not in get_args(Fit):
            raise ValueError(
                f"{type(self).__name__}: fit must be one of {get_args(Fit)}, got "
                f"{self.fit!r}."
            )
        if not self.double_quantization:
            return
        name = type(self).__name__
        if self.block_size is None:
            raise ValueError(
                f"{name}: block_size must be an integer with double_quantization, got "
                "None."
            )
        if self.scale_dtype != np.float32:
            raise ValueError(
                f"{name}: scale_dtype must be float32 with double_quantization, got "
                f"{self.scale_dtype.name!r}."
            )
        if not self._has_positive_scales:
            raise ValueError(
                f"{name}: affine must be True with double_quantization, got False: "
                "scales in 8 bits are positive, and those without offsets have signs."
            )

    @property
    def quantized_scales(self):
        return self.double_quantization

    def no_scales(self, lead, size):
        parts = super().no_scales(lead, size)
        if not self.double_quantization:
            return parts
        if not self.affine:
            return quantize_scales(parts, 0.0)
        scales, offsets = parts
        return quantize_scales(scales, 0.0), quantize_offsets(offsets)

    def scale_bytes(self, size):
        if not self.double_quantization:
            return super().scale_bytes(size)
        blocks = self.num_blocks(size)
        return (2 if self.affine else 1) * (blocks + num_groups(blocks))

    @property
    def signed_scales(self):
        return -self.table[0] != self.table[-1]

    @property
    def _has_positive_scales(self) -> bool:
        # With offsets they are a part of a range.
        return self.affine or not self.signed_scales

    @property
    def has_offsets(self):
        return self.affine

    @property
    def shares(self):
        """Those of a scale that a fit tries. With fewer levels it pays to cut off more
        of the largest values."""
        if self.fit == "absmax":
            return ()
        low, count = {4: (0.8, 21), 3: (0.5, 23)}.get(self.bits, (0.2, 35))
        return _evenly(low, 1.05, count if self.fit == "search" else 8)

    def encode(self, blocks, absmax, counts, limit, importance=None):
        """As every format; and a fit counts the squared error of each value as much as
        `importance`, of the shape of `blocks`, says."""
        start = self._covering_range if self.affine else self._covering_largest
        parts = start(blocks, absmax, limit)
        if self.fit != "absmax":
            parts = self._fitted(blocks, absmax, counts, limit, parts, importance)
        stored = self.stored_scales(parts.scales, limit)
        offsets = self._stored_offsets(parts.offsets)
        codes = self._codes(blocks, _Parts(stored.astype(absmax.dtype), offsets))
        return codes, (stored, offsets) if self.affine else stored

    def stored_scales(self, scales: Float[Array, "*lead blocks"], limit: float) -> Any:
        """Scales as the array has them."""
        return quantize_scales(scales, limit) if self.double_quantization else scales

    def _stored_offsets(self, offsets: Any) -> Any:
        twice = self.affine and self.double_quantization
        return quantize_offsets(offsets) if twice else offsets

    def _codes(self, blocks, parts: _Parts) -> UInt8[Array, "*lead blocks size"]:
        if parts.offsets is not None:
            blocks = blocks - parts.offsets.astype(blocks.dtype)[..., None]
        return self.nearest(blocks, parts.scales)

    def _covering_largest(self, blocks, absmax, limit) -> _Parts:
        """The largest magnitude takes the level of the largest magnitude. Where their
        signs differ, the scale is negative."""
        lowest, highest = self.table[0], self.table[-1]
        largest = max(-lowest, highest)
        scales = absmax if largest == 1 else true_divide(absmax, largest)
        scales = bound_scales(scales, absmax, self.scale_dtype, limit, largest=largest)
        if self.signed_scales:
            # Not by the minimum of a block, as XLA:CPU may drop a NaN from either.
            is_positive = max_blocks(blocks) >= absmax
            scales = jnp.where(is_positive == (highest > -lowest), scales, -scales)
        return _Parts(scales, None)

    def _covering_range(self, blocks, absmax, limit) -> _Parts:
        """The largest value takes the highest level, and the smallest the lowest."""
        lowest, highest = self.table[0], self.table[-1]
        # By shares of the largest magnitude, so that nothing overflows.
        unit = divide_blocks(blocks, absmax)
        top, bottom = max_blocks(unit), -max_blocks(-unit)
        scales = true_divide(top - bottom, highest - lowest)
        middle = (top + bottom) / 2 - scales * ((highest + lowest) / 2)
        return self._bounded(_Parts(scales * absmax, middle * absmax), absmax, limit)

    def _bounded(self, parts: _Parts, absmax, limit) -> _Parts:
        scales, offsets = parts
        largest = max(-self.table[0], self.table[-1])
        size = jnp.abs(scales)
        used = size if self.affine else absmax
        bounded = bound_scales(size, used, self.scale_dtype, limit, largest=largest)
        scales = jnp.where(scales < 0, -bounded, bounded)
        return _Parts(scales, None if offsets is None else offsets.astype(scales.dtype))

    def _fitted(
        self, blocks, absmax, counts, limit, start: _Parts, importance
    ) -> _Parts:
        """Of several scales the one with the least squared error. With least squares
        each is replaced first, twice, by the best scale for the codes that it gives."""
        is_real = jnp.arange(blocks.shape[-1]) < jnp.asarray(counts)[..., None]
        # Relative to absmax, so that no square over- or underflows.
        unit, one = divide_blocks(blocks, absmax), jnp.where(absmax > 0, absmax, 1)
        share = lambda part: true_divide(part.astype(one.dtype), one)[..., None]
        weigh = lambda x: x if importance is None else x * importance
        total = lambda x: sum_blocks(weigh(jnp.where(is_real, x, 0)))
        energy = lambda x: total(square(x))
        size = counts
        if importance is not None:
            size = total(jnp.ones_like(unit))
            size = jnp.where(size > 0, size, 1)
        twice = lambda x: jnp.where(x == x, x, 0)  # Rounded before it is added.

        def levels(parts: _Parts):
            return self.levels(self._codes(blocks, parts), blocks.dtype)

        def error_of(parts: _Parts):
            decoded = twice(levels(parts) * share(parts.scales))
            if parts.offsets is not None:
                decoded = decoded + share(parts.offsets)
            return energy(unit - decoded)

        def scaled(factor) -> _Parts:
            scales = start.scales.astype(one.dtype)
            shorter, offsets = scales * factor, start.offsets
            if offsets is not None:  # Around the same middle.
                middle = (self.table[0] + self.table[-1]) / 2
                offsets = offsets.astype(one.dtype) + (scales - shorter) * middle
            return self._bounded(_Parts(shorter, offsets), absmax, limit)

        def refined(parts: _Parts) -> _Parts:
            x, y = levels(parts), unit
            mean = lambda a: true_divide(total(a), size)[..., None]
            is_affine = parts.offsets is not None
            x_mean, y_mean = (mean(x), mean(y)) if is_affine else (0, 0)
            x, y = x - x_mean, y - y_mean
            per_square = total(square(x))
            slope = total(twice(x * y)) / jnp.where(per_square > 0, per_square, 1)
            scales, offsets = slope * one, None
            if is_affine:
                offsets = (y_mean - slope[..., None] * x_mean)[..., 0] * one
            new = self._bounded(_Parts(scales, offsets), absmax, limit)
            return _chosen(scales * parts.scales.astype(scales.dtype) > 0, new, parts)

        shares = jnp.asarray(self.shares, one.dtype)
        refinements = 2 if self.fit == "least_squares" else 0
        # What is less than rounding is no improvement: what was decoded stays.
        enough = energy(unit) * 2.0**-20

        def step(i, best):
            error, parts = best
            new = scaled(shares[i])
            if refinements:
                new = lax.fori_loop(
                    0, refinements, lambda _, parts: refined(parts), new
                )
            new_error = error_of(new)
            better = new_error < error - enough
            parts = _chosen(better, new, parts)
            return jnp.where(better, new_error, error), parts

        return lax.fori_loop(0, len(shares), step, (error_of(start), start))[1]


def _chosen(condition, new: _Parts, old: _Parts) -> _Parts:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
