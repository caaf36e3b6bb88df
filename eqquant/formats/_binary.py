"""Binary: {-1, +1} times a scale, one bit each."""

import dataclasses

import jax.numpy as jnp

from ._divide import divide_blocks, true_divide
from ._format import bound_scales, Format, sum_blocks


@dataclasses.dataclass(frozen=True, repr=False)
class Binary(Format):
    """{-1, +1} times the mean magnitude, stored in one bit, the sign. Zero becomes +1.

    The mean magnitude is the scale with the least squared error (XNOR-Net, arXiv
    1603.05279).

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, "binary")
        assert 8 * q.codes.nbytes / q.size == 1
        assert (q.dequantize() * weight > 0).all()
        ```

    **Arguments:**

    - `block_size`: the number of consecutive values that share a scale; `None` (the
        default) for one scale per channel.
    - `scale_dtype`: the dtype of scales: float32, bfloat16, float16 or float64.
    """

    name = "binary"
    bits = 1
    integer_levels = True
    unit_levels = True

    def encode(self, blocks, absmax, counts, limit):
        # Relative to absmax, so that no sum overflows.
        relative = jnp.abs(divide_blocks(blocks, absmax))
        mean = true_divide(sum_blocks(relative), counts)
        scales = bound_scales(mean * absmax, absmax, self.scale_dtype, limit)
        return self.nearest(blocks, scales), scales

    def nearest(self, blocks, scales):
        del scales
        return (blocks < 0).astype(jnp.uint8)

    def levels(self, codes, dtype):
        doubled = codes << 1
        if codes.dtype == jnp.uint8:
            doubled = doubled.astype(jnp.int8)
        return (1 - doubled).astype(dtype)
