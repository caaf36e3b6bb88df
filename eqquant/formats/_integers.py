"""Integers of 4, 3 and 2 bits."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ._fitted import Fit, FittedFormat
from ._format import divide_blocks


class _Integers(FittedFormat):
    """Those of `bits` bits. A code is the integer plus the magnitude of the lowest."""

    integer_levels = True

    def __init_subclass__(cls, **kwargs):
        half = 2 ** (cls.bits - 1)
        cls.largest_level, cls.highest_level, cls.padding_code = half, half - 1, half
        cls.table = tuple(range(-half, half))
        super().__init_subclass__(**kwargs)

    def nearest(self, blocks, scales):
        half = self.largest_level
        levels = jnp.round(divide_blocks(blocks, scales))
        return (jnp.clip(levels, -half, half - 1) + half).astype(jnp.uint8)

    def levels(self, codes, dtype):
        if codes.dtype == jnp.uint8:
            codes = codes.astype(jnp.int8)
        return (codes - self.largest_level).astype(dtype)


@dataclasses.dataclass(frozen=True, repr=False)
class Int4(_Integers):
    """4-bit integers in [-8, 7], times a scale. Halves round to even.

    The largest magnitude of a block takes the lowest integer, and the scale the sign
    that this needs. So it is a level itself, and quantizing a dequantized array gives
    the same codes and scales again. Q4_0 of GGUF files has this rule, too.

    **Arguments:**

    - `block_size`: how many consecutive values share one scale; `None` for one scale
        per channel.
    - `scale_dtype`: of the scales, and offsets: float32, bfloat16 or float64.
    - `fit`: how a block gets its scale. `"absmax"`: by its largest magnitude.
        `"search"`: out of several shares of the largest magnitude, the one with the
        least squared error. `"least_squares"`: find the best scale for the codes, and
        the codes for that scale, twice, from eight starts; and take the best. With
        these two, quantizing a dequantized array gives the same codes and scales again
        only where some value of a block is the lowest level, and only if the dtype of
        the array is not shorter than that of the scales.
    - `affine`: give each block an offset, too: `value = level * scale + offset`. With
        `fit="absmax"` the largest value then takes the highest level, and the smallest
        the lowest. A product takes one more product for each block: the offset times
        the sum of the activation.
    - `double_quantization`: store scales and offsets in 8 bits, as in
        [`eqquant.NF4`][]. Needs `affine`, as other scales may be negative.
    """

    block_size: int | None = 32
    fit: Fit = "absmax"
    affine: bool = False
    double_quantization: bool = False

    name = "int4"
    bits = 4


@dataclasses.dataclass(frozen=True, repr=False)
class Int3(_Integers):
    """3-bit integers in [-4, 3], times a scale. Halves round to even.

    Everything is as in [`eqquant.Int4`][], except for the defaults: blocks of 64,
    scales in bfloat16, and `fit="search"`.
    """

    block_size: int | None = 64
    scale_dtype: Any = "bfloat16"
    fit: Fit = "search"
    affine: bool = False
    double_quantization: bool = False

    name = "int3"
    bits = 3


@dataclasses.dataclass(frozen=True, repr=False)
class Int2(_Integers):
    """2-bit integers in [-2, 1], times a scale. Halves round to even.

    Everything is as in [`eqquant.Int4`][], except for the defaults: blocks of 64,
    scales in bfloat16, and `fit="search"`.
    """

    block_size: int | None = 64
    scale_dtype: Any = "bfloat16"
    fit: Fit = "search"
    affine: bool = False
    double_quantization: bool = False

    name = "int2"
    bits = 2
