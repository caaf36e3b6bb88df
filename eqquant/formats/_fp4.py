"""FP4: floats of 4 bits, in blocks with short scales."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax

from ._format import divide_blocks, Format, true_divide
from ._fp8 import to_float8
from ._scales import Float8Scales, PowerOfTwoScales
from ._table import count_below


_levels = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class _FP4(Format):
    """E2M1: a sign, two bits of exponent and one of mantissa."""

    bits = 4
    codebook = (*_levels, *(-level for level in _levels))
    largest_level = 6

    def __post_init__(self):
        super().__post_init__()
        name = type(self).__name__
        if self.block_size is None:
            raise ValueError(f"{name}: block_size must be an integer, got None.")
        if self.scale_dtype != np.float32:
            raise ValueError(
                f"{name}: scale_dtype must be float32, which its scales decode to, got "
                f"{self.scale_dtype.name!r}."
            )

    @property
    def quantized_scales(self):
        return True

    def nearest(self, blocks, scales):
        unit = divide_blocks(blocks, scales)
        # Halves go to the even one of two codes: every other time to the higher.
        below = lambda x: np.nextafter(unit.dtype.type(x), unit.dtype.type(0))
        ends = [0.25, below(0.75), 1.25, below(1.75), 2.5, below(3.5), 5.0]
        code = count_below(jnp.abs(unit), ends)
        return code | (jnp.signbit(unit).astype(jnp.uint8) << jnp.uint8(3))


@dataclasses.dataclass(frozen=True, repr=False)
class MXFP4(_FP4):
    """Floats of 4 bits, in blocks that share a power of two: 4.25 bits a weight.

    Levels are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign. The scale is `2 **
    (floor(log2(absmax)) - 2)`. Both are as in the OCP Microscaling specification
    (version 1.0), which has blocks of 32. Values above 6 times the scale become that.
    Halves round to the even code.

    Powers of two below `2 ** -126` are not used: XLA takes these for zero on a CPU.

    **Arguments:**

    - `block_size`: how many consecutive values share one scale.
    - `scale_dtype`: float32: what scales decode to.
    """

    block_size: int | None = 32

    name = "mxfp4"

    def no_scales(self, lead, size):
        return PowerOfTwoScales(jnp.zeros((*lead, self.num_blocks(size)), jnp.uint8))

    def scale_bytes(self, size):
        return self.num_blocks(size)

    def encode(self, blocks, absmax, counts, limit):
        del counts, limit
        bits = lax.bitcast_convert_type(absmax.astype(jnp.float32), jnp.uint32)
        exponents = jnp.maximum((bits >> 23).astype(jnp.int32) - 2, 1)
        exponents = jnp.where(jnp.isfinite(absmax), exponents, 255)
        exponents = jnp.where(absmax > 0, exponents, 0)
        scales = PowerOfTwoScales(exponents.astype(jnp.uint8))
        return self.nearest(blocks, scales.astype(absmax.dtype)), scales


@dataclasses.dataclass(frozen=True, repr=False)
class NVFP4(_FP4):
    """Floats of 4 bits, in blocks of 16 with a float of 8 bits as the scale, and one
    float32 for all scales of a row: 4.5 bits a weight.

    Levels are those of [`eqquant.MXFP4`][]. The scale of a block is its largest
    magnitude over 6, rounded to E4M3 times the float32, which is the largest magnitude
    of the row over `6 * 448`. There is one float32 for each row, so that rows can be
    sliced and stacked; quantize over all axes for one per tensor. It is cut to 16 bits,
    so that the product of level, scale and float32 is exact.

    Quantizing a dequantized array gives the same codes and scales again, except for
    blocks whose largest magnitude is below `2 ** -14` of that of their row.

    **Arguments:**

    - `block_size`: how many consecutive values share one scale.
    - `scale_dtype`: float32: what scales decode to.
    """

    block_size: int | None = 16

    name = "nvfp4"

    def no_scales(self, lead, size):
        codes = jnp.zeros((*lead, self.num_blocks(size)), jnp.uint8)
        return Float8Scales(codes, jnp.zeros((*lead, 1), jnp.float32))

    def scale_bytes(self, size):
        return self.num_blocks(size) + 4

    def encode(self, blocks, absmax, counts, limit):
        del counts, limit
        absmax = absmax.astype(jnp.float32)
        largest = jnp.max(absmax, -1, keepdims=True)
        unit = true_divide(largest, 6 * 448)
        bits = lax.bitcast_convert_type(unit, jnp.uint32) & jnp.uint32(0xFFFFFF00)
        unit = lax.bitcast_convert_type(bits, jnp.float32)
        tiny = float(jnp.finfo(jnp.float32).tiny)
        unit = jnp.where(largest > 0, jnp.maximum(unit, tiny), 0)
        finite = jnp.all(jnp.isfinite(absmax), -1, keepdims=True)
        unit = jnp.where(finite, unit, jnp.nan)
        share = true_divide(true_divide(absmax, 6), jnp.where(unit > 0, unit, 1))
        codes = jnp.maximum(to_float8(share, "e4m3fn"), (absmax > 0).astype(jnp.uint8))
        scales = Float8Scales(codes, unit)
        return self.nearest(blocks, scales.astype(blocks.dtype)), scales
