"""Integers of 6, 5, 4, 3 and 2 bits."""

import dataclasses

import jax.numpy as jnp

from ._divide import divide_blocks
from ._fitted import DoubleQuantization, Fit, FittedFormat, LowBitFormat


@dataclasses.dataclass(frozen=True, repr=False)
class _Integers(FittedFormat):
    """Integers of `bits` bits. A code is the integer minus the lowest integer: `-2 **
    (bits - 1)`, or 0 if `unsigned`."""

    block_size: int | None = 32
    fit: Fit = "absmax"
    affine: bool = False
    double_quantization: DoubleQuantization = False
    unsigned: bool = False

    integer_levels = True

    @property
    def lowest_level(self):
        return 0 if self.unsigned else -(2 ** (self.bits - 1))

    @property
    def highest_level(self):
        return 2**self.bits - 1 + self.lowest_level

    @property
    def largest_level(self):
        return max(self.highest_level, -self.lowest_level)

    @property
    def padding_code(self):
        return -self.lowest_level

    @property
    def table(self):
        return range(self.lowest_level, self.highest_level + 1)

    def nearest(self, blocks, scales):
        lowest, highest = self.lowest_level, self.highest_level
        levels = jnp.round(divide_blocks(blocks, scales))
        return (jnp.clip(levels, lowest, highest) - lowest).astype(jnp.uint8)

    def levels(self, codes, dtype):
        if codes.dtype == jnp.uint8:
            codes = codes.astype(jnp.int8)
        return (codes + self.lowest_level).astype(dtype)


class Int4(_Integers):
    """4-bit integers in [-8, 7], times a scale. Ties round to even.

    The largest magnitude of a block is mapped to the lowest integer, and the scale has
    the sign that this requires. So the largest magnitude is exact, and quantizing a
    dequantized array gives the same codes and scales. Q4_0 in GGUF files has the same
    rule.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, eqquant.Int4(scale_dtype="bfloat16"))
        assert 8 * q.nbytes / q.size == 4.5
        assert q.dequantize().shape == weight.shape
        ```

    **Arguments:**

    - `block_size`: the number of consecutive values that share a scale; `None` for one
        scale per channel.
    - `scale_dtype`: the dtype of scales and offsets: float32, bfloat16,
        float16 or float64.
    - `fit`: the algorithm that chooses scales. `"absmax"` uses the largest magnitude of
        a block. `"search"` tries several candidates relative to it, and takes the one
        with the least squared error. `"least_squares"` alternates twice between the
        best scale for the codes and the codes for that scale, from eight starts, and
        takes the best result. With the last two, quantizing a dequantized array gives
        the same codes and scales only if a value of the block is the lowest level, and
        if the dtype of the array is not narrower than `scale_dtype`.
    - `affine`: add an offset to each block: `value = level * scale + offset`. With
        `fit="absmax"`, the largest value is mapped to the highest level, and the
        smallest to the lowest level. A product computes one more product per block: the
        offset times the sum of the activation.
    - `double_quantization`: store scales and offsets in 8 bits, as in
        [`eqquant.NF4`][]. It requires `affine`, because other scales may be negative.
        `"k"` stores integers times a float16 for each 256 values, like K-quants in GGUF
        files. The integers have 8 bits for 6-bit codes, and otherwise 6 bits, in a
        byte. Affine 2-bit codes have integers of 4 bits. Quantizing a dequantized array
        does not always give the same codes and scales.
    - `unsigned`: use the integers [0, 15] instead. It requires `affine`. Then the
        offset of a block is its smallest value, as in Q4_1 in GGUF files.
    """

    name = "int4"
    bits = 4


@dataclasses.dataclass(frozen=True, repr=False)
class Int6(_Integers):
    """6-bit integers in [-32, 31], times a scale. Ties round to even.

    Everything is as in [`eqquant.Int4`][], except for the default block size. Q6_K in
    GGUF files has such codes.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, eqquant.formats.Int6(scale_dtype="float16"))
        assert 8 * q.nbytes / q.size == 6.25
        ```
    """

    block_size: int | None = 64

    name = "int6"
    bits = 6


class Int5(_Integers):
    """5-bit integers in [-16, 15], times a scale. Ties round to even.

    Everything is as in [`eqquant.Int4`][]. Q5_0 and Q5_1 in GGUF files have such codes.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, eqquant.formats.Int5(scale_dtype="float16"))
        assert 8 * q.nbytes / q.size == 5.5
        ```
    """

    name = "int5"
    bits = 5


@dataclasses.dataclass(frozen=True, repr=False)
class Int3(LowBitFormat, _Integers):
    """3-bit integers in [-4, 3], times a scale. Ties round to even.

    Everything is as in [`eqquant.Int4`][], except for the defaults: blocks of 64,
    bfloat16 scales, and `fit="search"`.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, eqquant.Int3(block_size=32))
        assert 8 * q.nbytes / q.size == 3.5
        ```
    """

    name = "int3"
    bits = 3


@dataclasses.dataclass(frozen=True, repr=False)
class Int2(LowBitFormat, _Integers):
    """2-bit integers in [-2, 1], times a scale. Ties round to even.

    Everything is as in [`eqquant.Int4`][], except for the defaults: blocks of 64,
    bfloat16 scales, and `fit="search"`.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, eqquant.Int2(affine=True))
        assert 8 * q.nbytes / q.size == 2.5
        ```
    """

    name = "int2"
    bits = 2
