"""Rounding to narrow numbers: scales, minifloats, and stochastic rounding."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key, Shaped, UInt16, UInt32

from ...arrays import hadamard


def absmax(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Return the largest magnitude along an axis, which keeps one element. If a value
    is not finite, so is the result."""
    # The float maximum of XLA:CPU may drop a NaN.
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(0x7FFFFFFF)
    largest = lambda bits: jnp.max(bits, axis, keepdims=True, initial=0)

    def by_halves(bits):
        while bits.shape[-1] % 256 == 0:
            bits = jnp.maximum(*jnp.split(bits, 2, -1))
        return largest(bits)

    # The maximum of XLA:CPU along the last axis is slow. The TPU compiler fuses one
    # reduction into the program around it, but would store all halves.
    if axis == -1 and bits.shape[-1] % 256 == 0:
        most = lax.platform_dependent(bits, cpu=by_halves, default=largest)
    else:
        most = largest(bits)
    return lax.bitcast_convert_type(most, jnp.float32)


def unit_of(x: Float[Array, "..."], axis: int, largest: float) -> Float[Array, "..."]:
    """Return the scale of each row along an axis, by which its largest magnitude
    becomes `largest`. The scale is NaN if a value is not finite."""
    most = absmax(x, axis)
    most = jnp.where(jnp.isfinite(most), most, jnp.nan)
    # Below this limit, the scale is subnormal, and flushed to zero.
    is_zero = most < largest * jnp.finfo(jnp.float32).tiny
    return jnp.where(is_zero, 1, most * jnp.float32(1 / largest))


def round_to(
    y: Float[Array, "..."],
    mantissa: int,
    lowest: int,
    largest: float,
    rounding: Callable,
) -> Float[Array, "..."]:
    """Round to floats with `mantissa` explicit bits and the exponent `lowest` or more.

    Values beyond `largest` become `largest`. `rounding` rounds to integers.

    XLA may skip a conversion to a narrow float and back, so that values that were
    converted are not rounded. It does not skip this arithmetic.
    """
    exponent = lax.bitcast_convert_type(y, jnp.int32) >> 23 & 0xFF
    exponent = jnp.clip(exponent - 127, lowest, 127)
    steps = rounding(y * power_of_two(mantissa - exponent))
    rounded = steps * power_of_two(exponent - mantissa)
    return jnp.clip(rounded, -largest, largest)


def rounding_by(
    shape: Sequence[int], seed: UInt32[Array, "*stack 2"] | None
) -> Callable:
    """Return a function that rounds an array of this shape to integers: to nearest
    without a seed; otherwise up, with the probability of the remainder."""
    if seed is None:
        return jnp.round
    noise = (noise_for(shape, seed).astype(jnp.float32) + 0.5) * 2.0**-16
    return lambda y: jnp.floor(y + noise)


def power_of_two(exponent: Int[Array, "..."]) -> Float[Array, "..."]:
    """Return `2**exponent` exactly, for normal float32 numbers."""
    return lax.bitcast_convert_type(exponent + 127 << 23, jnp.float32)


def noise_for(
    shape: Sequence[int], seed: UInt32[Array, "*stack 2"]
) -> UInt16[Array, "..."]:
    """Return random bits for the rounding of an array. Its first axes are the stack.

    They depend on the seed and on the position, so not on how a mesh splits the array.
    This is a hash, ten times as fast on CPUs as the bits of `jax.random`.
    """
    ones = [1] * (len(shape) - seed.ndim + 1)
    first, last = (seed[..., i].reshape(*seed.shape[:-1], *ones) for i in range(2))
    hash = jnp.broadcast_to(first, shape)
    for axis in range(len(shape)):
        iota = lax.broadcasted_iota(jnp.uint32, shape, axis)
        hash = _mixed(hash + iota * jnp.uint32(0x9E3779B9)) ^ last
    return (hash >> 16).astype(jnp.uint16)


def seed_of(key: Key[Array, "*stack"], salt: int) -> UInt32[Array, "*stack 2"]:
    """Return the seed of [`noise_for`][]. Different salts give independent noise."""
    bits = jax.random.key_data(key)[..., -2:]
    return _mixed(bits + jnp.uint32(salt))


def _mixed(h):
    """The last steps of MurmurHash3."""
    h = (h ^ h >> 16) * jnp.uint32(0x85EBCA6B)
    h = (h ^ h >> 13) * jnp.uint32(0xC2B2AE35)
    return h ^ h >> 16


def in_blocks(x: Shaped[Array, "..."], axis: int, block: int) -> Shaped[Array, "..."]:
    """Split an axis, counted from the end, into blocks. The blocks are padded with
    zeros. The position in the block is again the axis `axis`."""
    place = axis + x.ndim
    padding = [(0, 0)] * x.ndim
    padding[place] = 0, -x.shape[place] % block
    x = jnp.pad(x, padding)
    return x.reshape(*x.shape[:place], -1, block, *x.shape[place + 1 :])


def from_blocks(x: Array, axis: int, size: int) -> Array:
    """Invert [`in_blocks`][], for an axis of the given size."""
    place = axis + x.ndim - 1
    x = x.reshape(*x.shape[:place], -1, *x.shape[place + 2 :])
    return lax.slice_in_dim(x, 0, size, axis=place)


# One vector for all products, as in the recipe for NVFP4 (arXiv 2509.25149).
_signs = np.array([1, -1, 1, 1, -1, -1, 1, -1, 1, 1, 1, -1, -1, 1, -1, -1], np.float32)


def random_hadamard(
    x: Float[Array, "..."], axis: int, inverse: bool = False
) -> Float[Array, "..."]:
    """Multiply each block of 16 along an axis by random signs, and by the Hadamard
    matrix. The padded blocks stay in the result."""
    blocks = in_blocks(x, axis, len(_signs))
    signs = jnp.asarray(_signs, x.dtype).reshape(-1, *(1,) * (-1 - axis))
    rotate = lambda x: hadamard(x, axis, len(_signs))
    out = rotate(blocks) * signs if inverse else rotate(blocks * signs)
    # Without a barrier, XLA:CPU folds a constant operand, and then reads the bits of
    # the transposed constant in the wrong order.
    out = lax.optimization_barrier(out)
    return from_blocks(out, axis, out.shape[axis] * out.shape[axis - 1])
