"""The base class of formats with a table of levels: how it fits scales and offsets."""

import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any, ClassVar, get_args, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from .._jax import check_one_of
from ._divide import divide_blocks, true_divide
from ._format import bound_scales, Format, max_blocks, square, sum_blocks
from ._two_level_scales import (
    integer_scales,
    num_groups,
    quantize_offsets,
    quantize_scales,
    SUPERBLOCK,
)


Fit: TypeAlias = Literal["absmax", "search", "least_squares"]
DoubleQuantization: TypeAlias = bool | Literal["k"]


class _Parts(NamedTuple):
    """The scale and the offset of each block."""

    scales: Float[Array, "*lead blocks"]
    offsets: Any


@ft.cache
def _linspace(first: float, last: float, count: int) -> tuple[float, ...]:
    return tuple(first + (last - first) * i / (count - 1) for i in range(count))


class FittedFormat(Format):
    """A format that scales a table of levels to each block.

    A subclass defines `table`, the levels in ascending order, and `nearest`. It may
    have the fields `fit`, `affine`, `double_quantization` and `unsigned`. Double
    quantization to 8 bits needs positive scales.
    """

    fit: Fit = "absmax"
    affine: bool = False
    double_quantization: DoubleQuantization = False
    unsigned: bool = False

    # The levels, in ascending order.
    table: ClassVar[Sequence[float]]

    def __post_init__(self):
        super().__post_init__()
        if self.unsigned and not self.affine:
            raise ValueError(
                f"{type(self).__name__}: affine must be True with unsigned, got False: "
                "levels from 0 to the highest one need an offset."
            )
        default = jnp.dtype(type(self).scale_dtype)
        if self.double_quantization and self.scale_dtype == default:
            # 8-bit scales decode to float32.
            object.__setattr__(self, "scale_dtype", np.dtype("float32"))
        name = type(self).__name__
        check_one_of(name, "fit", self.fit, get_args(Fit))
        if not self.double_quantization:
            return
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
        choices = False, True, *get_args(get_args(DoubleQuantization)[1])
        given = self.double_quantization
        check_one_of(name, "double_quantization", given, choices)
        if self.is_k_quant:
            self._check_k_quant(name)
        elif not self._has_positive_scales:
            raise ValueError(
                f"{name}: affine must be True with double_quantization, got False. "
                "8-bit scales are positive, but scales without offsets have signs."
            )

    def _check_k_quant(self, name: str) -> None:
        sizes = [SUPERBLOCK // 2**i for i in range(6)]
        if self.block_size not in sizes:
            raise ValueError(
                f"{name}: block_size must be one of {sizes} with "
                f"double_quantization='k', got {self.block_size}."
            )

    @property
    def is_k_quant(self) -> bool:
        return self.double_quantization == "k"

    @property
    def block_multiple(self):
        # A byte holds the four-bit scales of two blocks.
        is_short = self.is_k_quant and self._integer_bits == 4
        return 2 if is_short else 1

    @property
    def range_dtype(self):
        return np.dtype("float16") if self.is_k_quant else self.scale_dtype

    @property
    def _integer_bits(self) -> int:
        """The bits of the integers in [`eqquant.formats.IntegerScales`][]."""
        return {2: 4 if self.affine else 6, 6: 8}.get(self.bits, 6)

    @property
    def quantized_scales(self):
        return bool(self.double_quantization)

    def no_scales(self, lead, size):
        parts = super().no_scales(lead, size)
        if not self.affine:
            return self.stored_scales(parts, 0.0)
        scales, offsets = parts
        return self.stored_scales(scales, 0.0), self._stored_offsets(offsets)

    def scale_bytes(self, size):
        if not self.double_quantization:
            return super().scale_bytes(size)
        blocks = self.num_blocks(size)
        each = blocks + num_groups(blocks)
        if self.is_k_quant:
            halves = 2 * math.ceil(blocks * (self.block_size or 1) / SUPERBLOCK)
            each = blocks // (2 if self._integer_bits == 4 else 1) + halves
        return (2 if self.affine else 1) * each

    @property
    def signed_scales(self):
        return -self.table[0] != self.table[-1]

    @property
    def _has_positive_scales(self) -> bool:
        # With offsets, a scale is a fraction of the range of a block.
        return self.affine or not self.signed_scales

    @property
    def has_offsets(self):
        return self.affine

    @property
    def centred(self):
        if not self.unsigned:
            return self, 0
        return dataclasses.replace(self, unsigned=False), 2 ** (self.bits - 1)

    @property
    def shares(self):
        """The candidate factors for the scales of a fit. With fewer levels it pays to
        clip more of the largest values."""
        if self.fit == "absmax":
            return ()
        low, count = {
            **{6: (0.9, 21), 5: (0.85, 21), 4: (0.8, 21), 3: (0.5, 23)},
        }.get(self.bits, (0.2, 35))
        return _linspace(low, 1.05, count if self.fit == "search" else 8)

    def encode(self, blocks, absmax, counts, limit, importance=None):
        """Encode blocks as `Format.encode` does. `importance`, of the shape of
        `blocks`, weights the squared errors of a fit."""
        if self.is_k_quant and self.affine and not self.unsigned:
            # A product has such a format, see `centred`.
            raise ValueError(
                f"{type(self).__name__}: unsigned must be True with affine=True and "
                "double_quantization='k', got False: the integers of offsets have no "
                "sign."
            )
        start = self._covering_range if self.affine else self._covering_largest
        parts = start(blocks, absmax, limit)
        if self.fit != "absmax":
            problem = _FitProblem.make(self, blocks, absmax, counts, limit, importance)
            parts = _fit(problem, parts)
        stored = self.stored_scales(parts.scales, limit)
        offsets = self._stored_offsets(parts.offsets)
        codes = self.codes_of(blocks, _Parts(stored.astype(absmax.dtype), offsets))
        return codes, (stored, offsets) if self.affine else stored

    def stored_scales(self, scales: Float[Array, "*lead blocks"], limit: float) -> Any:
        """Return scales as the quantized array stores them."""
        if self.is_k_quant:
            return self._in_integers(scales)
        return quantize_scales(scales, limit) if self.double_quantization else scales

    def _stored_offsets(self, offsets: Any) -> Any:
        if offsets is None or not self.double_quantization:
            return offsets
        return (
            self._in_integers(offsets) if self.is_k_quant else quantize_offsets(offsets)
        )

    def _in_integers(self, scales: Any) -> Any:
        assert self.block_size is not None
        is_signed = not self.affine
        return integer_scales(scales, self.block_size, self._integer_bits, is_signed)

    def codes_of(self, blocks, parts: _Parts) -> Integer[Array, "*lead blocks size"]:
        """Return the codes of the nearest levels."""
        if parts.offsets is not None:
            blocks = blocks - parts.offsets.astype(blocks.dtype)[..., None]
        return self.nearest(blocks, parts.scales)

    def _covering_largest(self, blocks, absmax, limit) -> _Parts:
        """Map the largest magnitude of a block to the level of the largest magnitude.
        The scale is negative where their signs differ."""
        lowest, highest = self.table[0], self.table[-1]
        largest = max(-lowest, highest)
        scales = absmax if largest == 1 else true_divide(absmax, largest)
        scales = bound_scales(scales, absmax, self.scale_dtype, limit, largest=largest)
        if self.signed_scales:
            # Not from the minimum of a block: XLA:CPU may drop a NaN from it.
            is_positive = max_blocks(blocks) >= absmax
            scales = jnp.where(is_positive == (highest > -lowest), scales, -scales)
        return _Parts(scales, None)

    def _covering_range(self, blocks, absmax, limit) -> _Parts:
        """Map the smallest and the largest value of a block to the outermost levels."""
        lowest, highest = self.table[0], self.table[-1]
        # Relative to the largest magnitude, so that the range cannot overflow.
        relative = divide_blocks(blocks, absmax)
        top, bottom = max_blocks(relative), -max_blocks(-relative)
        if self.is_k_quant:
            bottom = jnp.minimum(bottom, 0)
        scales = true_divide(top - bottom, highest - lowest)
        middle = (top + bottom) / 2 - scales * ((highest + lowest) / 2)
        return self.bounded(_Parts(scales * absmax, middle * absmax), absmax, limit)

    def bounded(self, parts: _Parts, absmax, limit) -> _Parts:
        """Bound scales, so that they and the decoded values are finite."""
        scales, offsets = parts
        largest = max(-self.table[0], self.table[-1])
        size = jnp.abs(scales)
        magnitude = size if self.affine else absmax
        bounded = bound_scales(
            size, magnitude, self.scale_dtype, limit, largest=largest
        )
        scales = jnp.where(scales < 0, -bounded, bounded)
        if self.is_k_quant and offsets is not None:
            # The integers of offsets have no sign, and their unit is negative.
            offsets = jnp.minimum(offsets, 0)
        return _Parts(scales, None if offsets is None else offsets.astype(scales.dtype))


@dataclasses.dataclass(frozen=True, repr=False)
class LowBitFormat(FittedFormat):
    """The fields and defaults of formats of two and three bits."""

    block_size: int | None = 64
    scale_dtype: Any = "bfloat16"
    fit: Fit = "search"
    affine: bool = False
    double_quantization: DoubleQuantization = False


@dataclasses.dataclass(frozen=True)
class _FitProblem:
    """The least-squares problem of each block. Values are relative to the largest
    magnitude of the block, so that squares neither overflow nor underflow.

    - `absmax`: the largest magnitudes of the blocks.
    - `target`: the relative values.
    - `divisor`: `absmax`, or 1 in blocks of zeros.
    - `is_real`: false for padding.
    - `size`: the number of values in a block, or their total importance.
    """

    format: FittedFormat
    blocks: Float[Array, "*lead blocks size"]
    absmax: Float[Array, "*lead blocks"]
    limit: float
    importance: Float[Array, "*lead blocks size"] | None
    target: Float[Array, "*lead blocks size"]
    divisor: Float[Array, "*lead blocks"]
    is_real: Any
    size: Any

    @classmethod
    def make(cls, format, blocks, absmax, counts, limit, importance) -> "_FitProblem":
        # JAX can be configured to refuse operands of different ranks and dtypes.
        counts = jnp.asarray(counts, absmax.dtype)
        counts = counts.reshape(*[1] * (absmax.ndim - counts.ndim), *counts.shape)
        shape = (*[1] * absmax.ndim, blocks.shape[-1])
        places = lax.broadcasted_iota(counts.dtype, shape, absmax.ndim)
        is_real = places < counts[..., None]
        target, divisor = (
            divide_blocks(blocks, absmax),
            jnp.where(absmax > 0, absmax, 1),
        )
        args = format, blocks, absmax, limit, importance, target, divisor, is_real
        problem = cls(*args, size=counts)
        if importance is None:
            return problem
        size = problem.total(jnp.ones_like(target))
        return dataclasses.replace(problem, size=jnp.where(size > 0, size, 1))

    def total(self, x):
        """Return the weighted sum of each block."""
        x = jnp.where(self.is_real, x, 0)
        return sum_blocks(x if self.importance is None else x * self.importance)

    def relative(self, part):
        return true_divide(part.astype(self.divisor.dtype), self.divisor)[..., None]

    def levels(self, parts: _Parts):
        codes = self.format.codes_of(self.blocks, parts)
        return self.format.levels(codes, self.blocks.dtype)

    def bounded(self, scales, offsets) -> _Parts:
        parts = _Parts(scales, offsets)
        return self.format.bounded(parts, self.absmax, self.limit)


def _fit(problem: _FitProblem, start: _Parts) -> _Parts:
    """Return the candidate with the smallest squared error.

    Candidates multiply the scales of `start` by `FittedFormat.shares`. A fit by least
    squares refines each of them twice.
    """
    shares = jnp.asarray(problem.format.shares, problem.divisor.dtype)
    refinements = 2 if problem.format.fit == "least_squares" else 0
    # Improvements below rounding error are ignored, so that decoded arrays are kept.
    threshold = problem.total(square(problem.target)) * 2.0**-20

    def step(i, best):
        error, parts = best
        new = _scaled(problem, start, shares[i])
        if refinements:
            refine = lambda _, parts: _refined(problem, parts)
            new = lax.fori_loop(0, refinements, refine, new)
        new_error = _error_of(problem, new)
        better = new_error < error - threshold
        parts = _select(better, new, parts)
        return jnp.where(better, new_error, error), parts

    best = _error_of(problem, start), start
    return lax.fori_loop(0, len(shares), step, best)[1]


def _error_of(problem: _FitProblem, parts: _Parts):
    """Return the squared error of each block."""
    scaled = problem.levels(parts) * problem.relative(parts.scales)
    decoded = _rounded(scaled)
    if parts.offsets is not None:
        decoded = decoded + problem.relative(parts.offsets)
    return problem.total(square(problem.target - decoded))


def _scaled(problem: _FitProblem, start: _Parts, factor) -> _Parts:
    """Scale the levels around the middle of the table."""
    dtype, table = problem.divisor.dtype, problem.format.table
    scales = start.scales.astype(dtype)
    shorter, offsets = scales * factor, start.offsets
    if offsets is not None:
        middle = (table[0] + table[-1]) / 2
        offsets = offsets.astype(dtype) + (scales - shorter) * middle
    return problem.bounded(shorter, offsets)


def _refined(problem: _FitProblem, parts: _Parts) -> _Parts:
    """Return the best scale and offset for the codes that `parts` give. Keep `parts`
    where the sign of the scale would change."""
    x, y = problem.levels(parts), problem.target
    mean = lambda a: true_divide(problem.total(a), problem.size)[..., None]
    is_affine = parts.offsets is not None
    x_mean, y_mean = (mean(x), mean(y)) if is_affine else (0, 0)
    x, y = x - x_mean, y - y_mean
    x_square = problem.total(square(x))
    slope = problem.total(_rounded(x * y)) / jnp.where(x_square > 0, x_square, 1)
    scales, offsets = slope * problem.divisor, None
    if is_affine:
        offsets = (y_mean - slope[..., None] * x_mean)[..., 0] * problem.divisor
    new = problem.bounded(scales, offsets)
    return _select(scales * parts.scales.astype(scales.dtype) > 0, new, parts)


def _rounded(x):
    """Return `x`, rounded before it is added: this prevents fused multiply-adds."""
    return jnp.where(x == x, x, 0)


def _select(condition, new: _Parts, old: _Parts) -> _Parts:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
