"""INT4: symmetric 4-bit integers."""

import dataclasses

import jax.numpy as jnp

from ._format import bound_scales, divide_blocks, Format, max_blocks, true_divide


@dataclasses.dataclass(frozen=True, repr=False)
class Int4(Format):
    """4-bit integers in [-8, 7], times a scale. Halves round to even.

    A block whose largest magnitude is that of a negative value has the scale `absmax /
    8`; any other `absmax / 7`. So the largest value is a level itself, and quantizing a
    dequantized array gives the same codes and scales again.

    Scales are positive here. Negative ones, as in the Q4_0 of GGUF files, decode and
    multiply all the same.

    **Arguments:**

    - `block_size`: how many consecutive values share one scale; `None` for one scale
        per channel.
    - `scale_dtype`: of the scales: float32, bfloat16 or float64.
    - `precision`, `activations`: the arithmetic of products; see [`eqquant.Format`][].
    """

    block_size: int | None = 32

    name = "int4"
    bits = 4
    integer_levels = True
    largest_level = 8
    highest_level = 7
    padding_code = 8  # A code is the level plus 8.

    def encode(self, blocks, absmax, counts, limit):
        del counts
        # Not the maximum of a block, from which XLA:CPU may drop a NaN.
        is_positive = max_blocks(blocks) >= absmax

        def scales_of(largest: int):
            scales = true_divide(absmax, largest)
            dtype = self.scale_dtype
            return bound_scales(scales, absmax, dtype, limit, largest=largest)

        # In the first kind of block no level is below -7.
        scales = jnp.where(is_positive, scales_of(7), scales_of(8))
        return self.nearest(blocks, scales), scales

    def nearest(self, blocks, scales):
        levels = jnp.round(divide_blocks(blocks, scales))
        return (jnp.clip(levels, -8, 7) + 8).astype(jnp.uint8)

    def levels(self, codes, dtype):
        if codes.dtype == jnp.uint8:
            codes = codes.astype(jnp.int8)
        return (codes - 8).astype(dtype)
