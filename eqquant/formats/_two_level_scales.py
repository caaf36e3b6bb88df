"""Scales in two levels: short numbers, times one outer number for each group of
blocks."""

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float16, Int8, Integer, UInt8

from ._divide import true_divide
from ._fp8 import from_float8, to_float8
from ._scales import power_of_two, ShortScales


# The number of scales that share an exponent.
GROUP = 256


class _TwoLevelScales(ShortScales):
    """Codes times one outer number for each `group` blocks. The last group of a row may
    be partial."""

    codes: Array

    # The name of the field of outer numbers.
    outer_name: ClassVar[str] = "units"

    @property
    def codes_of_blocks(self):
        return self.codes

    @property
    def outer(self) -> Any:
        return getattr(self, self.outer_name)

    @property
    def group(self) -> int:
        """The number of blocks that share an outer number: a power of two."""
        groups = max(self.outer.shape[-1], 1)
        return 1 << (-(-self.shape[-1] // groups) - 1).bit_length()

    def _each(self, outer: Float[Array, "*lead groups"]) -> Float[Array, "..."]:
        """Repeat each outer number for the blocks of its group."""
        *lead, groups = outer.shape
        if groups <= 1:
            return outer
        # `jnp.repeat` raises an error on meshes with explicit axes.
        outer = jnp.broadcast_to(outer[..., None], (*lead, groups, self.group))
        return outer.reshape(*lead, -1)[..., : self.shape[-1]]

    def gather(self, fn, fill):
        in_outer = fill
        if not jnp.issubdtype(self.outer.dtype, jnp.floating):
            in_outer = fill if fill is None or fill == 0 else 255
        return self._with(fn(self.codes, None), fn(self.outer, in_outer))

    def _with(self, codes: Array, outer: Array) -> Any:
        kind: Any = type(self)
        return kind(codes, outer)

    def _codes_of(self, start: int, stop: int) -> Any:
        return self.codes[..., start:stop]

    def slice(self, start, stop):
        outer, group = self.outer, self.group
        if outer.shape[-1] > 1:
            if start % group:
                return NotImplemented
            outer = outer[..., start // group : -(-stop // group)]
        codes = self._codes_of(start, stop)
        return codes if codes is NotImplemented else self._with(codes, outer)

    def split(self, parts):
        if self.outer.shape[-1] > 1:
            return self.shape[-1] % (parts * self.group) == 0
        return super().split(parts)


class QuantizedScales(_TwoLevelScales):
    """Positive scales in 8 bits: `code * 2 ** (exponent - 127)`.

    This is the double quantization of QLoRA (arXiv 2305.14314, section 3), in which 256
    consecutive scales of a row share a factor. QLoRA subtracts the mean of the scales,
    and stores signed codes and a float32 factor. Here, codes are unsigned and no mean
    is subtracted. The factor is a power of two, stored as the 8 bits of a float32
    exponent (E8M0 in the OCP Microscaling formats). So `code * 2 ** n` is exact.

    It has the `shape` of an array of scales, and `astype` decodes it to floats.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, eqquant.NF4(double_quantization=True))
        assert isinstance(q.scales, eqquant.formats.QuantizedScales)
        assert q.scales.codes.shape == (64, 256 // 64)
        ```

    **Fields:**

    - `codes`: `(*lead, blocks)`: 0 if and only if the whole block is zero.
    - `exponents`: `(*lead, groups)`, biased by 127; 255 represents NaN.
    """

    codes: UInt8[Array, "*lead blocks"]
    exponents: UInt8[Array, "*lead groups"]

    outer_name = "exponents"

    @property
    def group(self):
        return GROUP

    def astype(self, dtype) -> Float[Array, "*lead blocks"]:
        """Decode the scales."""
        return (self.codes.astype(jnp.float32) * self._units).astype(dtype)

    @property
    def _units(self) -> Float[Array, "*lead #blocks"]:
        return self._each(power_of_two(self.exponents))

    def nearest(self, scales):
        units = self._units
        codes = jnp.round(scales / jnp.where(units > 0, units, 1))
        codes = jnp.clip(codes, jnp.where(scales > 0, 1, 0), 255)
        return QuantizedScales(codes.astype(jnp.uint8), self.exponents)


class QuantizedOffsets(QuantizedScales):
    """Offsets in 8 bits, like [`eqquant.formats.QuantizedScales`][], but with signed
    codes from -127 to 127. Zero is exact.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        format = eqquant.NF3(affine=True, double_quantization=True)
        q = eqquant.quantize(weight, format)
        assert isinstance(q.offsets, eqquant.formats.QuantizedOffsets)
        assert q.offsets.astype("float32").shape == (64, 256 // 64)
        ```
    """

    codes: Int8[Array, "*lead blocks"]  # pyright: ignore[reportIncompatibleVariableOverride]

    def nearest(self, scales):
        units = self._units
        codes = jnp.round(scales / jnp.where(units > 0, units, 1))
        codes = jnp.clip(codes, -127, 127).astype(jnp.int8)
        return QuantizedOffsets(codes, self.exponents)


class IntegerScales(_TwoLevelScales):
    """Scales or offsets in integers of 8 bits, times one float16 for each 256 weights,
    as in K-quants of GGUF files.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 512))
        format = eqquant.formats.Int6(16, double_quantization="k")
        scales = eqquant.quantize(weight, format).scales
        assert isinstance(scales, eqquant.formats.IntegerScales)
        assert scales.codes.shape == (64, 512 // 16)
        assert scales.units.shape == (64, 512 // 256)
        ```

    **Fields:**

    - `codes`: `(*lead, blocks)`: uint8 in affine formats, and otherwise int8.
    - `units`: `(*lead, groups)`.
    """

    codes: UInt8[Array, "*lead blocks"] | Int8[Array, "*lead blocks"]
    units: Float16[Array, "*lead groups"]

    @property
    def integers(self) -> Integer[Array, "*lead blocks"]:
        """The code of each block."""
        return self.codes

    def astype(self, dtype):
        # The products of 11 and 8 bits are exact.
        return (self.integers.astype(jnp.float32) * self._units).astype(dtype)

    @property
    def _units(self) -> Float[Array, "*lead #blocks"]:
        return self._each(self.units.astype(jnp.float32))

    def nearest(self, scales):
        info = jnp.iinfo(self.codes.dtype)
        return self.rounded(scales, info.min, info.max)

    def rounded(self, scales: Float[Array, "*lead blocks"], low: Any, high: Any) -> Any:
        """Return the nearest scales with codes from `low` to `high`."""
        units = self._units
        codes = jnp.round(scales / jnp.where(units != 0, units, 1))
        return type(self)(
            self._pack(jnp.clip(codes, low, high).astype(self.codes.dtype)), self.units
        )

    def _pack(self, codes: Array) -> Array:
        return codes


class FourBitScales(IntegerScales):
    """Scales or offsets in integers of 4 bits, as in Q2_K of GGUF files. Everything
    else is as in [`eqquant.formats.IntegerScales`][].

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 512))
        format = eqquant.Int2(16, affine=True, unsigned=True, double_quantization="k")
        scales = eqquant.quantize(weight, format).scales
        assert isinstance(scales, eqquant.formats.FourBitScales)
        assert scales.shape == (64, 512 // 16) and scales.codes.shape == (64, 16)
        ```

    **Fields:**

    - `codes`: `(*lead, blocks / 2)`. The low half of a byte is the code of the first of
        two blocks.
    - `units`: `(*lead, groups)`.
    """

    codes: UInt8[Array, "*lead pairs"]  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def shape(self):
        *lead, pairs = self.codes.shape
        return (*lead, 2 * pairs)

    @property
    def size(self):
        return 2 * self.codes.size

    @property
    def integers(self):
        pairs = jnp.stack([self.codes & 15, self.codes >> 4], -1)
        return pairs.reshape(self.shape)

    def _codes_of(self, start, stop):
        if start % 2 or stop % 2:
            return NotImplemented
        return self.codes[..., start // 2 : stop // 2]

    def split(self, parts):
        return super().split(parts) and self.codes.shape[-1] % parts == 0

    def nearest(self, scales):
        return self.rounded(scales, 0, 15)

    def _pack(self, codes):
        return codes[..., ::2] | codes[..., 1::2] << 4


class Float8Scales(_TwoLevelScales):
    """8-bit float scales (E4M3), times one float32 per row.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        scales = eqquant.quantize(weight, "nvfp4").scales
        assert scales.codes.shape == (64, 256 // 16) and scales.units.shape == (64, 1)
        assert scales.astype("float32").shape == scales.shape
        ```

    **Fields:**

    - `codes`: `(*lead, blocks)`.
    - `units`: `(*lead, 1)`.
    """

    codes: UInt8[Array, "*lead blocks"]
    units: Float[Array, "*lead 1"]

    def astype(self, dtype):
        return (from_float8(self.codes, "e4m3fn") * self.units).astype(dtype)

    def nearest(self, scales):
        share = true_divide(scales, jnp.where(self.units > 0, self.units, 1))
        codes = to_float8(jnp.minimum(share, 448), "e4m3fn")
        codes = jnp.maximum(codes, (scales > 0).astype(jnp.uint8))
        return Float8Scales(codes, self.units)


def quantize_scales(scales: Float[Array, "*lead blocks"], limit: float):
    """Quantize scales to 8 bits. None exceeds `limit`, and positive ones stay
    positive."""
    scales = scales.astype(jnp.float32)
    *lead, blocks = scales.shape
    groups = num_groups(blocks)
    if not blocks:
        empty = jnp.zeros(scales.shape, jnp.uint8)
        return QuantizedScales(empty, empty)
    filled = groups * GROUP - blocks
    padded = jnp.pad(scales, [(0, 0)] * len(lead) + [(0, filled)])
    exponents = _exponents(jnp.max(padded.reshape(*lead, groups, GROUP), -1))
    units = jnp.repeat(power_of_two(exponents), GROUP, axis=-1)[..., :blocks]
    # Division by a power of two is exact.
    codes = jnp.round(scales / jnp.where(units > 0, units, 1))
    largest = jnp.minimum(255, jnp.floor(limit / jnp.where(units > 0, units, 1)))
    codes = jnp.clip(codes, jnp.where(scales > 0, 1, 0), largest)
    return QuantizedScales(codes.astype(jnp.uint8), exponents)


def quantize_offsets(offsets: Float[Array, "*lead blocks"]) -> QuantizedOffsets:
    """Quantize offsets to 8 bits. Their units are twice the units of scales, because
    one bit is the sign."""
    offsets = offsets.astype(jnp.float32)
    exponents = quantize_scales(jnp.abs(offsets), jnp.inf).exponents
    exponents = jnp.where((exponents > 0) & (exponents < 254), exponents + 1, exponents)
    zeros = jnp.zeros(offsets.shape, jnp.int8)
    return QuantizedOffsets(zeros, exponents).nearest(offsets)


# The number of weights that share an outer number in `IntegerScales`.
SUPERBLOCK = 256


def integer_scales(
    scales: Float[Array, "*lead blocks"], block_size: int, bits: int, signed: bool
) -> IntegerScales:
    """Quantize scales to [`IntegerScales`][] of `bits` bits, or to [`FourBitScales`][].

    The scale of the largest magnitude in a group gets the outermost integer. The unit
    has the sign that this requires. Scales that are not signed must have equal signs.
    """
    *lead, blocks = scales.shape
    group = SUPERBLOCK // block_size
    groups = -(-blocks // group)
    kind, dtype = IntegerScales, jnp.int8 if signed else jnp.uint8
    if bits == 4:
        kind, blocks = FourBitScales, blocks // 2
    low, high = (
        (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    )
    scales = scales.astype(jnp.float32)
    filled = [(0, 0)] * len(lead) + [(0, groups * group - scales.shape[-1])]
    grouped = jnp.pad(scales, filled).reshape(*lead, groups, group)
    most, least = jnp.max(grouped, -1), jnp.min(grouped, -1)
    units = jnp.where(most >= -least, most, least) / (low if signed else high)
    # NaN may be lost in a maximum, but not in a sum.
    units = jnp.where(jnp.isfinite(jnp.sum(grouped, -1)), units, jnp.nan)
    empty = kind(jnp.zeros((*lead, blocks), dtype), units.astype(jnp.float16))
    return empty.rounded(scales, low, high)


def num_groups(blocks: int) -> int:
    return -(-blocks // GROUP)


def _exponents(largest: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """Return the exponent of the smallest `2 ** n` with `255 * 2 ** n >= largest`."""
    bits = lax.bitcast_convert_type(largest, jnp.uint32)
    exponent = (bits >> 23).astype(jnp.int32) - 7
    # 255 is 1.9921875 * 2**7, and 0x7F0000 are the bits of that mantissa.
    is_larger = (bits & jnp.uint32(0x7FFFFF)) > jnp.uint32(0x7F0000)
    exponent += is_larger.astype(jnp.int32)
    exponent = jnp.where(jnp.isfinite(largest), jnp.maximum(exponent, 1), 255)
    return jnp.where(largest == 0, 0, exponent).astype(jnp.uint8)
