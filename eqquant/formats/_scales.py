"""Short scales, and functions of short scales and float scales."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8


class ShortScales(eqx.Module):
    """Scales in a few bits. They have the `shape` of an array of scales, and `astype`
    decodes them to floats."""

    @property
    @abc.abstractmethod
    def codes_of_blocks(self) -> UInt8[Array, "*lead blocks"]:
        """The component with one element per block."""

    @abc.abstractmethod
    def astype(self, dtype) -> Float[Array, "*lead blocks"]:
        """Decode the scales."""

    @abc.abstractmethod
    def gather(self, fn: Callable[[Array, Any], Array], fill: Any) -> "ShortScales":
        """Implement [`gather_scales`][]."""

    @abc.abstractmethod
    def nearest(self, scales: Float[Array, "*lead blocks"]) -> "ShortScales":
        """Return the nearest representation of scales that are positive or zero. Only
        `codes_of_blocks` may change."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes_of_blocks.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return self.codes_of_blocks.size

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the decoded scales."""
        return np.dtype("float32")

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in jax.tree.leaves(self))

    def slice(self, start: int, stop: int) -> Any:
        """Return the scales of blocks `start` to `stop`."""
        return jax.tree.map(lambda a: a[..., start:stop], self)

    def split(self, parts: int) -> bool:
        """Implement [`scales_split`][]."""
        blocks = self.shape[-1]
        return blocks == 1 or blocks % parts == 0


class PowerOfTwoScales(ShortScales):
    """Powers of two, `2 ** (exponent - 127)`, in 8 bits (E8M0 in the OCP Microscaling
    formats).

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        scales = eqquant.quantize(weight, "mxfp4").scales
        assert scales.exponents.shape == (64, 256 // 32)
        values = scales.astype("float32")
        assert (values == 2.0 ** (scales.exponents.astype("float32") - 127)).all()
        ```

    **Fields:**

    - `exponents`: `(*lead, blocks)`, biased by 127; 255 represents NaN, and 0
        represents zero, because XLA flushes `2 ** -127` to zero on CPUs.
    """

    exponents: UInt8[Array, "*lead blocks"]

    @property
    def codes_of_blocks(self):
        return self.exponents

    def astype(self, dtype):
        return power_of_two(self.exponents).astype(dtype)

    def nearest(self, scales):
        # Scales that a format chose are powers of two already.
        bits = lax.bitcast_convert_type(scales.astype(jnp.float32), jnp.uint32)
        return PowerOfTwoScales((bits >> 23).astype(jnp.uint8))

    def gather(self, fn, fill):
        fill = fill if fill is None or fill == 0 else 255
        return PowerOfTwoScales(fn(self.exponents, fill))


def power_of_two(exponents: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return `2 ** (exponent - 127)`, or NaN for 255."""
    bits = exponents.astype(jnp.uint32) << 23
    powers = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(exponents == 255, jnp.nan, powers)


def float_scales(scales, dtype=None) -> Float[Array, "*lead blocks"]:
    """Return scales as an array of a dtype, or of their own dtype."""
    return scales.astype(dtype or scales.dtype)


def scales_and_offsets(parts: Any, format: Any) -> tuple[Any, Any]:
    """Split the second result of `Format.encode` into scales, and offsets or None."""
    return parts if format.has_offsets else (parts, None)


def slice_scales(scales, start: int, stop: int):
    """Return the scales of blocks `start` to `stop`."""
    if isinstance(scales, ShortScales):
        return scales.slice(start, stop)
    return scales[..., start:stop]


def gather_scales(fn: Callable[[Array, Any], Array], scales, fill: Any):
    """Apply `fn(part, fill)` to each part. `fill` is None, 0 or NaN."""
    return (
        scales.gather(fn, fill) if isinstance(scales, ShortScales) else fn(scales, fill)
    )


def scales_split(scales, parts: int) -> bool:
    """Whether `parts` equal parts of a row contain whole blocks and groups."""
    if isinstance(scales, ShortScales):
        return scales.split(parts)
    return scales.shape[-1] == 1 or scales.shape[-1] % parts == 0
