"""Optimiser states in 8 and 4 bits."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

from .._jax import typed
from .rounded import absmax, from_blocks, in_blocks, round_to, rounding_by


@dataclasses.dataclass(frozen=True)
class _Floats:
    """Narrow floats with a sign, or without sign and zero."""

    exponent_bits: int
    mantissa: int
    is_signed: bool
    # The exponent of the smallest normal number, and the largest number.
    lowest: int
    largest: float

    @property
    def bits(self) -> int:
        return self.exponent_bits + self.mantissa + self.is_signed

    def encode(self, y: Float[Array, "..."], rounding: Callable) -> UInt8[Array, "..."]:
        """Return codes of numbers up to `largest`, in the order of magnitude."""
        size = jnp.abs(y)
        if not self.is_signed:
            size = jnp.maximum(size, jnp.float32(2.0**self.lowest))
        size = round_to(size, self.mantissa, self.lowest, self.largest, rounding)
        normal = lax.bitcast_convert_type(size, jnp.int32) >> (23 - self.mantissa)
        normal = normal - self._shift
        steps = size * jnp.float32(2.0 ** (self.mantissa - self.lowest))
        is_small = size < 2.0**self.lowest
        code = jnp.where(is_small, steps.astype(jnp.int32), normal)
        if self.is_signed:
            code = code + jnp.where(y < 0, 1 << (self.bits - 1), 0)
        return code.astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
        code = codes.astype(jnp.int32)
        if not self.is_signed:
            return self._normal(code)
        sign = code >> (self.bits - 1)
        code = code & ((1 << (self.bits - 1)) - 1)
        steps = code.astype(jnp.float32) * 2.0 ** (self.lowest - self.mantissa)
        size = jnp.where(code < 1 << self.mantissa, steps, self._normal(code))
        return jnp.where(sign == 1, -size, size)

    def _normal(self, code):
        bits = (code + self._shift) << (23 - self.mantissa)
        return lax.bitcast_convert_type(bits, jnp.float32)

    @property
    def _shift(self) -> int:
        # Signed numbers have an exponent for subnormal numbers and zero.
        return (127 + self.lowest - self.is_signed) << self.mantissa


@dataclasses.dataclass(frozen=True)
class _Integers:
    bits: int = 8
    largest: float = 127.0

    def encode(self, y: Float[Array, "..."], rounding: Callable) -> UInt8[Array, "..."]:
        y = jnp.clip(rounding(y), -self.largest, self.largest)
        return (y.astype(jnp.int32) & 0xFF).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
        return lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)


_E4M3 = _Floats(4, 3, True, -6, 448.0)
_E2M1 = _Floats(2, 1, True, 0, 6.0)
# Logarithmic: the smallest level is 2**-15 or 2**-7, and there is no zero.
_LOG8 = _Floats(4, 4, False, -15, 2 - 2.0**-4)
_LOG4 = _Floats(3, 1, False, -7, 1.5)
# The codes of first moments, and of the square roots of second moments.
_FORMATS: dict[str, tuple[Any, Any]] = {
    "fp8": (_E4M3, _LOG8),
    "int8": (_Integers(), _LOG8),
    "fp4": (_E2M1, _LOG4),
}


class QuantizedMoment(eqx.Module):
    """A moment in 8 or 4 bits.

    **Fields:**

    - `codes`: `(*lead, size)`, or with 4 bits half of the size, rounded up.
    - `scales`: `(*lead, blocks)`.
    - `size`, `block_size`, `dtype`: of the float moment, along its last axis.
    """

    codes: UInt8[Array, "*lead stored"]
    scales: Float[Array, "*lead blocks"]
    numbers: Any = eqx.field(static=True)
    is_second: bool = eqx.field(static=True)
    size: int = eqx.field(static=True)
    block_size: int = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the float moment."""
        return *self.codes.shape[:-1], self.size

    def dequantize(self) -> Float[Array, "*lead size"]:
        """Return the float moment."""
        codes = self.codes
        if self.numbers.bits == 4:
            both = jnp.stack([codes & 15, codes >> 4], -1)
            codes = both.reshape(*codes.shape[:-1], -1)[..., : self.size]
        blocks = in_blocks(self.numbers.decode(codes), -1, self.block_size)
        x = from_blocks(blocks * self.scales[..., None], -1, self.size)
        return (x * x if self.is_second else x).astype(self.dtype)


def _quantized(x, numbers, is_second: bool, block_size: int, seed) -> QuantizedMoment:
    size, wide = x.shape[-1], x.astype(jnp.float32)
    block_size = max(1, min(block_size, size))  # No padding of a short axis.
    blocks = in_blocks(jnp.sqrt(wide) if is_second else wide, -1, block_size)
    scales = absmax(blocks, -1) * jnp.float32(1 / numbers.largest)
    y = from_blocks(blocks * jnp.where(scales != 0, 1 / scales, 0), -1, size)
    codes = numbers.encode(y, rounding_by(y.shape, seed))
    if numbers.bits == 4:
        pairs = in_blocks(codes, -1, 2)
        codes = pairs[..., 0] | pairs[..., 1] << 4
    fields = numbers, is_second, size, block_size, x.dtype
    return QuantizedMoment(codes, scales[..., 0], *fields)


class QuantizedState(eqx.Module):
    """The state of [`quantized_state`][].

    - `count`: the number of steps, the seed of stochastic rounding.
    - `inner`: the state of the optimiser, with a [`QuantizedMoment`][] in place of each
        large moment.
    """

    count: Int32[Array, ""]
    inner: Any


class Transformation(NamedTuple):
    """`init` and `update`, like `optax.GradientTransformationExtraArgs`."""

    init: Callable
    update: Callable


@typed
def quantized_state(
    optimiser: Any,
    format: Literal["fp8", "int8", "fp4"] = "fp8",
    *,
    block_size: int | None = None,
    min_size: int = 4096,
    second: Sequence[str] = ("nu", "nu_max", "v", "sum_of_squares"),
) -> Any:
    """Keep the moments of an optax optimiser in 8 or 4 bits between steps.

    Each block of values along the last axis has a scale. First moments are E4M3, int8
    or E2M1. Second moments must not become zero, because an update divides by their
    square root: the square roots are stored as logarithmic codes without zero. Both are
    rounded stochastically, because a slow average would otherwise stay where it is.

    The codes have the shape of the moment, except for 4 bits, so they have the same
    sharding. They are `uint8`, which all checkpoints support.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import jax.numpy as jnp
        import optax

        model = eqx.nn.Linear(128, 128, key=jax.random.key(0))
        optimiser = eqquant.training.quantized_state(optax.adam(1e-3), "fp8")
        params = eqx.filter(model, eqx.is_inexact_array)
        state = optimiser.init(params)
        gradients = jax.tree.map(jnp.ones_like, params)
        updates, state = optimiser.update(gradients, state, params)
        model = eqx.apply_updates(model, updates)
        ```

    **Arguments:**

    - `optimiser`: an `optax.GradientTransformation`.
    - `format`: `"fp8"`, `"int8"` or `"fp4"`.
    - `block_size`: the number of values with one scale; by default 256, or 128 for
        `"fp4"`.
    - `min_size`: smaller arrays stay in floating point.
    - `second`: the names of the fields of states that hold second moments.

    **Returns:**

    An object with `init` and `update`, for any function that accepts an optax
    optimiser.

    **Raises:**

    `ValueError` for a block size below 2. `update` raises a `ValueError` for a state
    of another kind, tree, format or block size.
    """
    first_numbers, second_numbers = _FORMATS[format]
    block = block_size or (128 if format == "fp4" else 256)
    if block < 2:
        raise ValueError(f"quantized_state: block_size must be 2 or more, got {block}.")

    def encode(inner, count):
        places = 0

        def one(path, x):
            nonlocal places
            places += 1
            if not eqx.is_inexact_array(x) or not x.ndim or x.size < min_size:
                return x
            names = {getattr(key, "name", None) for key in path}
            is_second = bool(names & {*second})
            numbers = second_numbers if is_second else first_numbers
            seed = jnp.stack([count.astype(jnp.uint32), jnp.uint32(places)])
            return _quantized(x, numbers, is_second, block, seed)

        return jax.tree_util.tree_map_with_path(one, inner)

    def init(params):
        count = jnp.zeros((), jnp.int32)
        return QuantizedState(count, encode(optimiser.init(params), count))

    def update(updates, state, params=None, **extra):
        like = updates if params is None else params
        _check_state(state, lambda: init(like))
        inner = jax.tree.map(
            lambda x: x.dequantize() if _is_moment(x) else x,
            state.inner,
            is_leaf=_is_moment,
        )
        updates, inner = optimiser.update(updates, inner, params, **extra)
        count = state.count + 1
        return updates, QuantizedState(count, encode(inner, count))

    return Transformation(init, update)


def _is_moment(x: Any) -> bool:
    return isinstance(x, QuantizedMoment)


def _check_state(state: Any, expected: Callable[[], Any]) -> None:
    """Raise a `ValueError` unless a state has the arrays that `init` returns."""
    if not isinstance(state, QuantizedState):
        raise ValueError(
            "quantized_state: state must be from `init` of this optimiser, got "
            f"{type(state).__name__}."
        )
    found, wanted = map(_shapes, (state, jax.eval_shape(expected)))
    if found != wanted:
        path = min(x[0] for x in found.items() ^ wanted.items())
        raise ValueError(
            "quantized_state: state is of another tree, format or block size than "
            f"`init` would return for these parameters: {path} has the shape "
            f"{found.get(path)}, but must have {wanted.get(path)}. Call `init` with "
            "these parameters."
        )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}
