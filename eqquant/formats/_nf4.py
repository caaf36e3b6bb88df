"""NF4: the 4-bit NormalFloat of QLoRA."""

import dataclasses
from fractions import Fraction
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from ._format import bound_scales, divide_blocks, Format
from ._scales import num_groups, quantize_scales


# The published table (QLoRA, arXiv 2305.14314, appendix E), as float32 holds it.
_table = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def _midpoint(low: float, high: float, dtype) -> np.floating:
    """The largest float that does not exceed the exact midpoint, so that `x > midpoint`
    is the exact comparison for every float x, and a tie goes to the lower level."""
    exact = (Fraction(low) + Fraction(high)) / 2
    rounded = dtype.type(float(exact))
    if Fraction(float(rounded)) > exact:
        rounded = np.nextafter(rounded, dtype.type(-np.inf))
    return rounded


def _nearest(normalised: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """Index of the nearest table entry: a binary search by selects, four deep."""
    dtype = np.dtype(normalised.dtype)
    midpoints = [_midpoint(low, high, dtype) for low, high in pairwise(_table)]

    def search(low: int, high: int, bits: list) -> Any:
        """The midpoint to compare with next, given the bits known so far."""
        if not bits:
            return midpoints[(low + high) // 2]
        middle = (low + high) // 2
        return jnp.where(
            bits[0], search(middle, high, bits[1:]), search(low, middle, bits[1:])
        )

    bits = []
    for _ in range(4):
        bits.append(normalised > search(-1, 15, bits))
    code = bits[0].astype(jnp.uint8)
    for bit in bits[1:]:
        code = (code << jnp.uint8(1)) | bit.astype(jnp.uint8)
    return code


@dataclasses.dataclass(frozen=True, repr=False)
class NF4(Format):
    """4-bit NormalFloat: 16 levels at the quantiles of a normal distribution, times the
    largest magnitude of the block.

    The table is that of QLoRA (arXiv 2305.14314), bit for bit. A value takes the
    nearest level, and the lower one in a tie. Zero decodes to zero. A weight takes 4
    bits, and a block one scale: 4.5 bits a weight with the defaults.

    **Arguments:**

    - `block_size`: how many consecutive values share one scale; `None` for one scale
        per channel.
    - `scale_dtype`: of the scales: float32, bfloat16 or float64.
    - `precision`, `activations`: the arithmetic of products; see [`eqquant.Format`][].
    - `scale_search`: give each block the scale with the least squared error, out of
        0.80 to 1.05 of its largest magnitude. This is 0.6 dB better on normal weights.
        Quantizing a dequantized array then gives the same codes and scales again only
        in float32, as shorter dtypes round the decoded values.
    - `double_quantization`: store scales in 8 bits, and one more byte for each 256 of
        them in a row (QLoRA, section 3). This takes 4.127 bits a weight for rows of
        4096, and costs less than 0.01 dB. See [`eqquant.QuantizedScales`][].
    """

    block_size: int | None = 64
    scale_search: bool = False
    double_quantization: bool = False

    name = "nf4"
    bits = 4
    codebook = _table
    padding_code = 7

    def __post_init__(self):
        super().__post_init__()
        if not self.double_quantization:
            return
        if self.block_size is None:
            raise ValueError(
                "NF4: double_quantization must be of blocks: block_size must be an "
                "integer, got None."
            )
        if self.scale_dtype != np.float32:
            raise ValueError(
                "NF4: scale_dtype must be float32 with double_quantization, got "
                f"{self.scale_dtype.name!r}."
            )

    @property
    def quantized_scales(self):
        return self.double_quantization

    def no_scales(self, lead, size):
        scales = super().no_scales(lead, size)
        return quantize_scales(scales, 0.0) if self.double_quantization else scales

    def scale_bytes(self, size):
        if not self.double_quantization:
            return super().scale_bytes(size)
        blocks = self.num_blocks(size)
        return blocks + num_groups(blocks)

    @property
    def boundaries(self):
        if self.scale_search or self.double_quantization:
            return None
        dtype = np.dtype("float32")
        return tuple(float(_midpoint(*pair, dtype)) for pair in pairwise(_table))

    def encode(self, blocks, absmax, counts, limit):
        del counts
        scales = self._search(blocks, absmax) if self.scale_search else absmax
        scales = bound_scales(scales, absmax, self.scale_dtype, limit)
        if self.double_quantization:
            stored = quantize_scales(scales, limit)
            return self.nearest(blocks, stored.astype(absmax.dtype)), stored
        return self.nearest(blocks, scales), scales

    def nearest(self, blocks, scales):
        return _nearest(divide_blocks(blocks, scales))

    def _search(self, blocks, absmax):
        def step(i, best):
            best_error, best_scales = best
            factor = 0.80 + 0.0125 * i.astype(absmax.dtype)
            scales = (absmax * factor).astype(self.scale_dtype).astype(absmax.dtype)
            decoded = self.levels(self.nearest(blocks, scales), blocks.dtype)
            # Relative to absmax, so that no square over- or underflows.
            residual = unit - decoded * (scales / divisor)[..., None]
            error = jnp.sum(residual**2, -1)
            better = error < best_error
            return (
                jnp.where(better, error, best_error),
                jnp.where(better, scales, best_scales),
            )

        divisor = jnp.where(absmax > 0, absmax, 1)
        unit = divide_blocks(blocks, absmax)
        start = (jnp.full_like(absmax, jnp.inf), absmax)
        return lax.fori_loop(0, 21, step, start)[1]
