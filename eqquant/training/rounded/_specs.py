"""The numbers of a product: the rounding of its operands, and the multiplied values."""

import abc
import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from ._codes import (
    absmax,
    from_blocks,
    in_blocks,
    power_of_two,
    random_hadamard,
    round_to,
    rounding_by,
    unit_of,
)
from ._int8 import round_int8


class Coded(NamedTuple):
    """A rounded array.

    - `codes`: one for each value.
    - `scales`: one for each row or block, along the axis that was rounded.
    - `unit`: one scale for the whole matrix.
    """

    codes: Array
    scales: Array | None = None
    unit: Array | None = None


class Numbers(abc.ABC):
    """The numbers of one spec. Axes are -1 or -2, and are the contracted ones."""

    # True if each row has one scale. Products apply these scales after the sum.
    has_row_scales: ClassVar[bool] = False
    # The largest code.
    largest: float
    # The numbers of the other operand in a backward product.
    other: "Numbers"

    def __init__(self):
        self.other = self

    @abc.abstractmethod
    def _encode(
        self,
        x: Float[Array, "*stack rows columns"],
        axis: int,
        seed: UInt32[Array, "*stack 2"] | None = None,
    ) -> Coded:
        """Round an array in float32."""

    def encode(
        self,
        x: Float[Array, "*stack rows columns"],
        axis: int,
        seed: UInt32[Array, "*stack 2"] | None = None,
        factor: Float[Array, "*stack _ _"] | None = None,
    ) -> Coded:
        """Round `x`, times a factor for each row or column, along an axis; with a seed,
        stochastically."""
        return self._encode(times(x, factor), axis, seed)

    def encode_weight(self, w: Float[Array, "*stack rows columns"]) -> Coded:
        """Round a weight along its last axis."""
        return self.encode(w, -1)

    def spread(self, x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
        """Transform both operands of the weight gradient along the tokens."""
        del axis
        return x

    def gathered(self, x: Float[Array, "..."], axis: int, size: int):
        """Invert [`spread`][]."""
        del axis, size
        return x

    @abc.abstractmethod
    def operand(self, coded: Coded, axis: int) -> tuple[Array, Array | None]:
        """Return the operand of a product, and the factor of its result. The factor
        has one element along `axis`."""

    def decode(self, coded: Coded, axis: int) -> Float[Array, "*stack rows columns"]:
        """Return the rounded values in float32."""
        values, unit = self.operand(coded, axis)
        values = values.astype(jnp.float32)
        return values if unit is None else values * unit

    def counts(
        self, x: Float[Array, "..."], coded: Coded, axis: int
    ) -> Int[Array, "3"]:
        """Count the values of `x` beyond the largest number that their scale
        represents, those that became zero, and those that are not finite."""
        most = self.decode(
            coded._replace(codes=jnp.full_like(coded.codes, self.largest)), axis
        )
        x = times(x, None)
        is_finite = jnp.isfinite(x)
        # Scales are rounded, so the largest value of a row can be above its number.
        is_beyond = is_finite & (jnp.abs(x) > most * jnp.float32(1 + 2**-20))
        is_lost = (x != 0) & (coded.codes.astype(jnp.float32) == 0)
        return jnp.stack([jnp.sum(a) for a in (is_beyond, is_lost, ~is_finite)])


def times(x: Float[Array, "..."], factor: Float[Array, "..."] | None):
    """Return `x * factor` in float32."""
    x = x.astype(jnp.float32)
    return x if factor is None else x * factor


class BFloat16(Numbers):
    largest = float(jnp.finfo(jnp.bfloat16).max)

    def _encode(self, x, axis, seed=None):
        return Coded(lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16))

    def operand(self, coded, axis):
        return coded.codes, None


class PerRow(Numbers):
    """Int8 or 8-bit floats, with one scale per row."""

    has_row_scales = True

    def __init__(self, dtype: Any, mantissa: int, lowest: int, largest: float):
        super().__init__()
        self.dtype = jnp.dtype(dtype)
        self.mantissa, self.lowest, self.largest = mantissa, lowest, largest

    def encode(self, x, axis, seed=None, factor=None):
        if self.dtype == jnp.int8 and seed is None:
            return Coded(*round_int8(x, axis, factor))
        return super().encode(x, axis, seed, factor)

    def _encode(self, x, axis, seed=None):
        scales = unit_of(x, axis, self.largest)
        y = x * (1 / scales)
        if seed is not None:
            # The largest magnitude keeps its code, whatever 1 / scale rounds to.
            y = y * jnp.float32(1 + 2**-21)
        rounding = rounding_by(y.shape, seed)
        if self.dtype == jnp.int8:
            y = rounding(y)
        else:
            y = round_to(y, self.mantissa, self.lowest, self.largest, rounding)
        codes = jnp.clip(y, -self.largest, self.largest).astype(self.dtype)
        return Coded(codes, scales)

    def operand(self, coded, axis):
        return coded.codes, coded.scales


class MXFP8(Numbers):
    """E4M3 in blocks of 32 with power-of-two scales, rounded up (arXiv 2506.08027)."""

    block: ClassVar[int] = 32
    largest = 448.0

    def _encode(self, x, axis, seed=None):
        # Otherwise infinity would become the largest code.
        x = jnp.where(jnp.isfinite(x), x, jnp.nan)
        blocks = in_blocks(x, axis, self.block)
        share, exponents = jnp.frexp(absmax(blocks, axis) * np.float32(1 / 448))
        exponents = jnp.clip(exponents - (share <= 0.5), -126, 126)
        y = blocks * power_of_two(-exponents)
        y = round_to(y, 3, -6, 448.0, rounding_by(y.shape, seed))
        codes = from_blocks(y.astype(jnp.float8_e4m3fn), axis, x.shape[axis])
        return Coded(codes, jnp.squeeze(exponents, axis).astype(jnp.int8))

    def operand(self, coded, axis):
        assert coded.scales is not None
        factors = power_of_two(coded.scales.astype(jnp.int32))
        # A product of an E4M3 number and a power of two is exact in bfloat16.
        return _times_blocks(coded.codes, factors, axis, self.block), None


class NVFP4(Numbers):
    """E2M1 in blocks of 16 with E4M3 scales, and a float32 scale per matrix
    (arXiv 2509.25149). Codes are twice the value, in int8."""

    block: ClassVar[int] = 16
    largest = 12.0

    def encode_weight(self, w):
        return self._encode(times(w, None), -1, square=True)

    def _encode(self, x, axis, seed=None, square: bool = False):
        unit = unit_of(absmax(x, -1), -2, 6.0 * 448.0)
        blocks = in_blocks(x * (1 / unit), axis, self.block)
        most = jnp.squeeze(absmax(blocks, axis), axis)
        if square:  # Blocks of 16 by 16: the codes serve both directions.
            rows = most.shape[-2]
            most = jnp.repeat(
                jnp.max(in_blocks(most, -2, self.block), -2), self.block, -2
            )[..., :rows, :]
        # With noise, a value that saturates would be biased: round scales up.
        to_scale = jnp.round if seed is None else jnp.ceil
        scales = round_to(most * np.float32(1 / 6), 3, -6, 448.0, to_scale)
        each = jnp.expand_dims(scales, axis)
        y = blocks * jnp.where(each > 0, 1 / each, 0)
        y = round_to(y, 1, 0, 6.0, rounding_by(y.shape, seed))
        codes = from_blocks(y * 2, axis, x.shape[axis]).astype(jnp.int8)
        return Coded(codes, scales.astype(jnp.float8_e4m3fn), unit)

    def spread(self, x, axis):
        return random_hadamard(times(x, None), axis)

    def gathered(self, x, axis, size):
        return random_hadamard(x, axis, inverse=True)[..., :size, :]

    def operand(self, coded, axis):
        assert coded.scales is not None
        factors = coded.scales.astype(jnp.float32) * 0.5
        return _times_blocks(coded.codes, factors, axis, self.block), coded.unit


def _times_blocks(codes, factors, axis: int, block: int):
    blocks = in_blocks(codes.astype(jnp.float32), axis, block)
    out = blocks * jnp.expand_dims(factors, axis)
    return from_blocks(out, axis, codes.shape[axis]).astype(jnp.bfloat16)


NUMBERS: dict[str, Numbers] = {
    "int8": PerRow(jnp.int8, 7, 0, 127.0),
    "float8_e4m3fn": PerRow(jnp.float8_e4m3fn, 3, -6, 448.0),
    "float8_e5m2": PerRow(jnp.float8_e5m2, 2, -14, 57344.0),
    "bfloat16": BFloat16(),
    "mxfp8": MXFP8(),
    "nvfp4": NVFP4(),
}
NUMBERS["float8_e5m2"].other = NUMBERS["float8_e4m3fn"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The specs of the three products with a weight, for
    [`eqquant.training.low_precision`][].

    !!! Example

        ```python
        import eqquant

        recipe = eqquant.training.Recipe("int8", dgrad="bfloat16", wgrad="int8")
        assert recipe.dgrad == "bfloat16"
        ```

    **Arguments:**

    - `forward`: the spec of both operands of the product.
    - `dgrad`, `wgrad`: the spec of the gradient in the product for the activation,
        and in the product for the weight. By default, the spec of the forward product.
    - `stochastic`: round gradients stochastically, by the key of
        [`eqquant.training.with_rounding_key`][].
    - `observer`: set by [`eqquant.debug.saturated`][].

    **Raises:**

    `ValueError` for an unknown spec.
    """

    forward: str
    dgrad: str | None = None
    wgrad: str | None = None
    stochastic: bool = False
    observer: Callable | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        for name in ("dgrad", "wgrad"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.forward)
        for name in ("forward", "dgrad", "wgrad"):
            spec = getattr(self, name)
            if not isinstance(spec, str) or spec not in NUMBERS:
                raise ValueError(
                    f"Recipe: {name} must be one of {tuple(NUMBERS)}, got {spec!r}."
                )
        if not isinstance(self.stochastic, bool):
            raise TypeError(
                f"Recipe: stochastic must be a bool, got {self.stochastic!r}."
            )

    def numbers(self, product: str) -> Numbers:
        return NUMBERS[getattr(self, product)]

    def observe(self, label: tuple, numbers: Numbers, x, coded: Coded, axis: int):
        """Return the codes. Report their counts to the observer, if there is one."""
        if self.observer is not None:
            spec = next(name for name, n in NUMBERS.items() if n is numbers)
            observer = ft.partial(self.observer, (*label, spec), x.size)
            jax.debug.callback(observer, numbers.counts(x, coded, axis))
        return coded


PRESETS: dict[str, Recipe] = {
    "int8": Recipe("int8"),
    "fp8": Recipe("float8_e4m3fn", "float8_e5m2", "float8_e5m2"),
    "mxfp8": Recipe("mxfp8"),
    "nvfp4": Recipe("nvfp4", stochastic=True),
}
