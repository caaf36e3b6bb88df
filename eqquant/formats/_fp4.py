"""FP4: 4-bit floats, in blocks with short scales."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax

from ._divide import divide_blocks, true_divide
from ._format import Format
from ._fp8 import to_float8
from ._scales import PowerOfTwoScales
from ._table import count_below
from ._two_level_scales import Float8Scales


_levels = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class _FP4(Format):
    """E2M1 floats: a sign bit, two exponent bits and one mantissa bit."""

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
                f"{name}: scale_dtype must be float32, the dtype of decoded scales, "
                f"got {self.scale_dtype.name!r}."
            )

    @property
    def quantized_scales(self):
        return True

    def nearest(self, blocks, scales):
        relative = divide_blocks(blocks, scales)
        # Ties go to the even code, which is every other time the higher one.
        below = lambda x: np.nextafter(relative.dtype.type(x), relative.dtype.type(0))
        ends = [0.25, below(0.75), 1.25, below(1.75), 2.5, below(3.5), 5.0]
        code = count_below(jnp.abs(relative), ends)
        return code | (jnp.signbit(relative).astype(jnp.uint8) << jnp.uint8(3))


@dataclasses.dataclass(frozen=True, repr=False)
class MXFP4(_FP4):
    """4-bit floats, in blocks that share a power of two: 4.25 bits per weight.

    Levels are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign. The scale is `2 **
    (floor(log2(absmax)) - 2)`. Both follow the OCP Microscaling specification (version
    1.0), which has blocks of 32. Values are clipped to 6 times the scale. Ties round to
    the even code.

    Powers of two below `2 ** -126` are not used, because XLA flushes them to zero on
    CPUs.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, "mxfp4")
        assert 8 * q.nbytes / q.size == 4.25
        assert isinstance(q.scales, eqquant.formats.PowerOfTwoScales)
        ```

    **Arguments:**

    - `block_size`: the number of consecutive values that share a scale.
    - `scale_dtype`: float32, the dtype of decoded scales.
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
    """4-bit floats, in blocks of 16 with an 8-bit float as the scale, and one float32
    for all scales of a row: 4.5 bits per weight.

    The levels are the levels of [`eqquant.MXFP4`][]. The scale of a block is its
    largest magnitude over 6, rounded to E4M3 times the float32. The float32 is the
    largest magnitude of the row over `6 * 448`. Each row has its own float32, so that
    rows can be sliced and stacked. Quantize over all axes for one float32 per tensor.
    It is truncated to 16 bits, so that the product of level, scale and float32 is
    exact.

    Quantizing a dequantized array gives the same codes and scales, except for blocks
    whose largest magnitude is below `2 ** -14` times the largest magnitude of the row.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, "nvfp4")
        assert q.nbytes == weight.size // 2 + weight.size // 16 + 64 * 4
        assert isinstance(q.scales, eqquant.formats.Float8Scales)
        ```

    **Arguments:**

    - `block_size`: the number of consecutive values that share a scale.
    - `scale_dtype`: float32, the dtype of decoded scales.
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
        row_scale = true_divide(largest, 6 * 448)
        bits = lax.bitcast_convert_type(row_scale, jnp.uint32) & jnp.uint32(0xFFFFFF00)
        row_scale = lax.bitcast_convert_type(bits, jnp.float32)
        tiny = float(jnp.finfo(jnp.float32).tiny)
        row_scale = jnp.where(largest > 0, jnp.maximum(row_scale, tiny), 0)
        finite = jnp.all(jnp.isfinite(absmax), -1, keepdims=True)
        row_scale = jnp.where(finite, row_scale, jnp.nan)
        relative = true_divide(
            true_divide(absmax, 6), jnp.where(row_scale > 0, row_scale, 1)
        )
        codes = jnp.maximum(
            to_float8(relative, "e4m3fn"), (absmax > 0).astype(jnp.uint8)
        )
        scales = Float8Scales(codes, row_scale)
        return self.nearest(blocks, scales.astype(blocks.dtype)), scales
