"""Scales that are quantized themselves."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8


# So many scales share an exponent.
GROUP = 256


class QuantizedScales(eqx.Module):
    """Positive scales in 8 bits: `code * 2 ** (exponent - 127)`.

    This is the double quantization of QLoRA (arXiv 2305.14314, section 3): 256
    consecutive scales of a row share a number. QLoRA subtracts the mean of the scales,
    has signed codes for the rest, and a float of 32 bits as the number. Here codes are
    unsigned and no mean is subtracted. The number is a power of two in 8 bits, those of
    the exponent of float32 (E8M0 in the OCP Microscaling formats). So `code * 2 ** n`
    is exact.

    It takes the place of an array of scales: it has the same `shape`, and `astype`
    decodes it to floats.

    **Fields:**

    - `codes`: `(*lead, blocks)`: 0 where a whole block is zero, and only there.
    - `exponents`: `(*lead, groups)`, biased by 127; 255 stands for NaN.
    """

    codes: UInt8[Array, "*lead blocks"]
    exponents: UInt8[Array, "*lead groups"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def size(self) -> int:
        return self.codes.size

    @property
    def dtype(self) -> np.dtype:
        """Of the scales that they stand for."""
        return np.dtype("float32")

    @property
    def nbytes(self) -> int:
        return self.codes.size + self.exponents.size

    def astype(self, dtype) -> Float[Array, "*lead blocks"]:
        """The scales."""
        units = _power_of_two(self.exponents)
        if self.exponents.shape[-1] > 1:
            units = jnp.repeat(units, GROUP, axis=-1)[..., : self.codes.shape[-1]]
        return (self.codes.astype(jnp.float32) * units).astype(dtype)


def quantize_scales(scales: Float[Array, "*lead blocks"], limit: float):
    """In 8 bits, none above `limit`; a positive one stays positive."""
    scales = scales.astype(jnp.float32)
    *lead, blocks = scales.shape
    groups = num_groups(blocks)
    if not blocks:
        empty = jnp.zeros(scales.shape, jnp.uint8)
        return QuantizedScales(empty, empty)
    filled = groups * GROUP - blocks
    padded = jnp.pad(scales, [(0, 0)] * len(lead) + [(0, filled)])
    exponents = _exponents(jnp.max(padded.reshape(*lead, groups, GROUP), -1))
    units = jnp.repeat(_power_of_two(exponents), GROUP, axis=-1)[..., :blocks]
    # By a power of two: exact.
    codes = jnp.round(scales / jnp.where(units > 0, units, 1))
    largest = jnp.minimum(255, jnp.floor(limit / jnp.where(units > 0, units, 1)))
    codes = jnp.clip(codes, jnp.where(scales > 0, 1, 0), largest)
    return QuantizedScales(codes.astype(jnp.uint8), exponents)


def num_groups(blocks: int) -> int:
    return -(-blocks // GROUP)


def _exponents(largest: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """Of the smallest power of two of which 255 are at least `largest`."""
    bits = lax.bitcast_convert_type(largest, jnp.uint32)
    exponent = (bits >> 23).astype(jnp.int32) - 7
    # 255 is 1.9921875 * 2**7, and that the fraction of this.
    exponent += (bits & jnp.uint32(0x7FFFFF)) > jnp.uint32(0x7F0000)
    exponent = jnp.where(jnp.isfinite(largest), jnp.maximum(exponent, 1), 255)
    return jnp.where(largest == 0, 0, exponent).astype(jnp.uint8)


def _power_of_two(exponents: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    bits = exponents.astype(jnp.uint32) << 23
    powers = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(exponents == 255, jnp.nan, powers)


#
# Of scales of either kind
#


def float_scales(scales) -> Float[Array, "*lead blocks"]:
    return scales.astype(scales.dtype)


def scales_and_offsets(parts: Any, format: Any) -> tuple[Any, Any]:
    """What `Format.encode` returns beside codes, with None for offsets if there are
    none."""
    return parts if format.has_offsets else (parts, None)


def slice_scales(scales, start: int, stop: int):
    """Some of the blocks."""
    if not isinstance(scales, QuantizedScales):
        return scales[..., start:stop]
    if scales.exponents.shape[-1] == 1:
        return QuantizedScales(scales.codes[..., start:stop], scales.exponents)
    if start % GROUP:
        return NotImplemented
    exponents = scales.exponents[..., start // GROUP : num_groups(stop)]
    return QuantizedScales(scales.codes[..., start:stop], exponents)


def gather_scales(fn: Callable[[Array, Any], Array], scales, fill: Any):
    """`fn(part, fill)` of each part, where `fill` fills in scales: None, 0, or NaN."""
    if not isinstance(scales, QuantizedScales):
        return fn(scales, fill)
    in_exponents = fill if fill is None or fill == 0 else 255
    exponents = fn(scales.exponents, in_exponents)
    return QuantizedScales(fn(scales.codes, None), exponents)


def scales_split(scales, parts: int) -> bool:
    """Whether so many equal parts of a row each have whole blocks, and groups."""
    blocks = scales.shape[-1]
    if isinstance(scales, QuantizedScales) and scales.exponents.shape[-1] > 1:
        return blocks % (parts * GROUP) == 0
    return blocks == 1 or blocks % parts == 0
