"""Ternary: {-1, 0, 1} times a scale."""

import dataclasses
from typing import Any, get_args, Literal

import jax.numpy as jnp
from jax import lax

from .._jax import check_one_of
from ._divide import divide_blocks, true_divide
from ._format import bound_scales, Format, square, sum_blocks
from ._pack import DIGIT


_NonzeroRule = Literal["absmean", "threshold"]


@dataclasses.dataclass(frozen=True, repr=False)
class Ternary(Format):
    """{-1, 0, 1} times a scale, stored in 2 bits (two's complement).

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        bitnet = eqquant.Ternary(rule="absmean", least_squares=False)
        q = eqquant.quantize(weight, bitnet, axis=(0, 1))  # One scale per tensor.
        assert len(jax.numpy.unique(q.dequantize())) == 3
        ```

    **Arguments:**

    - `block_size`: the number of consecutive values that share a scale; `None` (the
        default) for one scale per channel. Quantize over all axes for one scale per
        tensor.
    - `scale_dtype`: the dtype of scales: float32, bfloat16, float16 or float64.
    - `rule`: selects the values that become nonzero. `"threshold"`: magnitudes above
        half a standard deviation. `"absmean"`: values that do not round to zero when
        they are divided by the mean magnitude, as in BitNet b1.58 (arXiv 2402.17764).
    - `least_squares`: use the scale with the least squared error for the codes, which
        is the mean magnitude of the nonzero values. It is more accurate, and quantizing
        a dequantized array gives the same codes and scales. With `False`, the scale is
        the mean magnitude of the whole block, as in BitNet.
    """

    rule: _NonzeroRule = "threshold"
    least_squares: bool = True

    name = "ternary"
    bits = 2
    integer_levels = True
    unused_codes = (0b10,)
    unit_levels = True

    def __post_init__(self):
        super().__post_init__()
        check_one_of("Ternary", "rule", self.rule, get_args(_NonzeroRule))

    def encode(self, blocks, absmax, counts, limit):
        # Relative to absmax, so that no sum overflows.
        relative = divide_blocks(blocks, absmax)
        magnitude = jnp.abs(relative)
        mean_magnitude = true_divide(sum_blocks(magnitude), counts)
        if self.rule == "absmean":
            threshold = mean_magnitude / 2
        else:
            mean = true_divide(sum_blocks(relative), counts)
            variance = true_divide(sum_blocks(square(relative)), counts) - square(mean)
            threshold = jnp.sqrt(jnp.maximum(variance, 0)) / 2
        nonzero = magnitude > threshold[..., None]
        if self.least_squares:
            counted, summed = (
                magnitude > x[..., None] for x in _for_each_use(threshold)
            )
            count = sum_blocks(counted.astype(blocks.dtype))
            total = sum_blocks(jnp.where(summed, magnitude, 0))
            scales = total / jnp.maximum(count, 1)
        else:
            scales = mean_magnitude
        scales = bound_scales(scales * absmax, absmax, self.scale_dtype, limit)
        return _codes(nonzero, blocks < 0), scales

    def nearest(self, blocks, scales):
        return _codes(jnp.abs(divide_blocks(blocks, scales)) > 0.5, blocks < 0)

    def levels(self, codes, dtype):
        low, high = codes & 1, codes & 2
        if codes.dtype == jnp.uint8:
            low, high = low.astype(jnp.int8), high.astype(jnp.int8)
        return (low - high).astype(dtype)


def _for_each_use(threshold):
    """Duplicate the threshold for two uses. Otherwise XLA for GPUs writes the
    comparison to memory, and reads it for each use. Other platforms compute it once."""
    return lax.platform_dependent(
        (threshold, threshold), cuda=lax.optimization_barrier, default=lambda x: x
    )


def _codes(nonzero, negative):
    # Two's complement in two bits: 0b01 is 1, 0b11 is -1.
    sign = (nonzero & negative).astype(jnp.uint8)
    return nonzero.astype(jnp.uint8) | (sign << jnp.uint8(1))


@dataclasses.dataclass(frozen=True, repr=False)
class DenseTernary(Ternary):
    """{-1, 0, 1} times a scale, with five codes in a byte: 1.625 bits per code.

    Everything is as in [`eqquant.Ternary`][], except for the packing and the defaults:
    blocks of 256 and float16 scales, as in TQ1_0 of GGUF files. Block sizes are
    multiples of 64.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, eqquant.formats.DenseTernary())
        assert 8 * q.nbytes / q.size == 1.6875
        ternary = eqquant.quantize(weight, eqquant.Ternary(256, "float16"))
        assert (q.dequantize() == ternary.dequantize()).all()
        ```
    """

    block_size: int | None = 256
    scale_dtype: Any = "float16"

    name = "dense_ternary"
    bits = DIGIT
    integer_levels = True
    unused_codes = (3,)
    unit_levels = True
    padding_code = 1

    def encode(self, blocks, absmax, counts, limit):
        codes, scales = super().encode(blocks, absmax, counts, limit)
        return _to_digits(codes), scales

    def nearest(self, blocks, scales):
        return _to_digits(super().nearest(blocks, scales))

    def levels(self, codes, dtype):
        if codes.dtype == jnp.uint8:
            codes = codes.astype(jnp.int8)
        return (codes - 1).astype(dtype)


def _to_digits(codes):
    return (codes + jnp.uint8(1)) & jnp.uint8(3)
