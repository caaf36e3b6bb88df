"""INT8: symmetric 8-bit integers."""

import dataclasses

import jax.numpy as jnp

from ._format import bound_scales, divide_blocks, Format, true_divide


@dataclasses.dataclass(frozen=True, repr=False)
class Int8(Format):
    """Symmetric 8-bit integers in [-127, 127], times `absmax / 127`. Ties round to
    even.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, eqquant.Int8(block_size=64))
        assert 8 * q.nbytes / q.size == 8.5
        assert abs(q.dequantize() - weight).max() < 0.02
        ```

    **Arguments:**

    - `block_size`: the number of consecutive values that share a scale; `None` (the
        default) for one scale per channel.
    - `scale_dtype`: the dtype of scales: float32 (whatever the dtype of the weight),
        bfloat16, float16 or float64.
    """

    name = "int8"
    bits = 8
    integer_levels = True
    largest_level = 127
    unused_codes = (-128,)

    def encode(self, blocks, absmax, counts, limit):
        del counts
        scales = true_divide(absmax, 127)
        scales = bound_scales(scales, absmax, self.scale_dtype, limit, largest=127)
        return self.nearest(blocks, scales), scales

    def nearest(self, blocks, scales):
        codes = jnp.round(divide_blocks(blocks, scales))
        return jnp.clip(codes, -127, 127).astype(jnp.int8)

    def levels(self, codes, dtype):
        return codes.astype(dtype)
