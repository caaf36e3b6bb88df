"""INT8: 8-bit integers."""

import dataclasses

import jax.numpy as jnp

from ._divide import divide_blocks
from ._fitted import FittedFormat


@dataclasses.dataclass(frozen=True, repr=False)
class Int8(FittedFormat):
    """Symmetric 8-bit integers in [-127, 127], times `absmax / 127`. Ties round to
    even.

    With `affine`, integers in [-128, 127], times a scale, plus an offset.

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
    - `affine`: add an offset to each block, as in [`eqquant.Int4`][].
    - `unsigned`: use the integers [0, 255] instead, as in [`eqquant.Int4`][].
    """

    affine: bool = False
    unsigned: bool = False

    name = "int8"
    bits = 8
    integer_levels = True

    @property
    def lowest_level(self):
        if self.unsigned:
            return 0
        return -128 if self.affine else -127

    @property
    def highest_level(self):
        return 127 + self._shift

    @property
    def largest_level(self):
        return max(self.highest_level, -self.lowest_level)

    @property
    def padding_code(self):
        return -self._shift

    @property
    def _shift(self) -> int:
        """A level minus its code."""
        return 128 if self.unsigned else 0

    @property
    def table(self):
        return range(self.lowest_level, self.highest_level + 1)

    @property
    def unused_codes(self):
        return () if self.affine else (-128,)

    def nearest(self, blocks, scales):
        codes = jnp.round(divide_blocks(blocks, scales))
        codes = jnp.clip(codes, self.lowest_level, self.highest_level)
        return (codes - self._shift).astype(jnp.int8)

    def levels(self, codes, dtype):
        return codes.astype(dtype) + self._shift if self._shift else codes.astype(dtype)
