"""FP8: 8-bit floats."""

import dataclasses
from typing import get_args

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer, UInt8

from .._jax import check_one_of
from ._divide import divide_blocks, true_divide
from ._format import bound_scales, Float8, Format


# Mantissa bits, exponent bias, and the code of the largest number.
_kinds = {"e4m3fn": (3, 7, 0x7E), "e5m2": (2, 15, 0x7B)}


@dataclasses.dataclass(frozen=True, repr=False)
class FP8(Format):
    """8-bit floats, times a scale: the largest magnitude over the largest float. Ties
    round to even.

    The floats follow the OCP 8-bit floating point specification (revision 1.0), like
    `ml_dtypes`. Codes of infinities and NaN are not used.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, eqquant.FP8(kind="e5m2", block_size=128))
        assert 8 * q.nbytes / q.size == 8.25
        ```

    **Arguments:**

    - `block_size`: the number of consecutive values that share a scale; `None` (the
        default) for one scale per channel.
    - `scale_dtype`: the dtype of scales: float32, bfloat16, float16 or float64.
    - `kind`: `"e4m3fn"` has 4 exponent and 3 mantissa bits, up to 448. `"e5m2"` has 5
        exponent and 2 mantissa bits, up to 57344.
    """

    kind: Float8 = "e4m3fn"

    name = "fp8"
    bits = 8

    def __post_init__(self):
        super().__post_init__()
        check_one_of("FP8", "kind", self.kind, get_args(Float8))

    @property
    def float8(self):
        return self.kind

    @property
    def code_dtype(self):
        return jnp.uint8

    @property
    def largest_level(self):
        return 448 if self.kind == "e4m3fn" else 57344

    @property
    def unused_codes(self):
        *_, largest = _kinds[self.kind]
        above = range(largest + 1, 128)
        return (*above, *(code + 128 for code in above))

    def encode(self, blocks, absmax, counts, limit):
        del counts
        largest = self.largest_level
        scales = true_divide(absmax, largest)
        scales = bound_scales(scales, absmax, self.scale_dtype, limit, largest=largest)
        return self.nearest(blocks, scales), scales

    def nearest(self, blocks, scales):
        return to_float8(divide_blocks(blocks, scales), self.kind)

    def levels(self, codes, dtype):
        return from_float8(codes, self.kind).astype(dtype)


def to_float8(x: Float[Array, "*shape"], kind: Float8) -> UInt8[Array, "*shape"]:
    """Return the code of the nearest float. Larger values become the largest float."""
    mantissa, bias, largest = _kinds[kind]
    x = x.astype(jnp.float32)
    size = jnp.minimum(jnp.abs(x), from_float8(jnp.uint8(largest), kind))
    bits = lax.bitcast_convert_type(size, jnp.uint32)
    shift = 23 - mantissa
    half = (1 << (shift - 1)) - 1
    rounded = (bits + half + ((bits >> shift) & 1)) >> shift
    normal = rounded - ((127 - bias) << mantissa)
    # Subnormal numbers are integers times the smallest of them.
    subnormal = jnp.round(size * 2.0 ** (mantissa + bias - 1)).astype(jnp.uint32)
    code = jnp.where(size < 2.0 ** (1 - bias), subnormal, normal).astype(jnp.uint8)
    return code | (jnp.signbit(x).astype(jnp.uint8) << jnp.uint8(7))


def from_float8(
    codes: Integer[Array, "*shape"], kind: Float8
) -> Float[Array, "*shape"]:
    """Decode to float32."""
    mantissa, bias, _ = _kinds[kind]
    size = codes.astype(jnp.uint32) & 0x7F
    bits = (size << (23 - mantissa)) + ((127 - bias) << 23)
    normal = lax.bitcast_convert_type(bits, jnp.float32)
    subnormal = size.astype(jnp.int32).astype(jnp.float32)
    subnormal = subnormal * 2.0 ** (1 - bias - mantissa)
    value = jnp.where(size < (1 << mantissa), subnormal, normal)
    return jnp.where((codes & 0x80) != 0, -value, value)
