"""Quantization followed by dequantization.

On a CPU this is one pass without codes. Other platforms quantize and dequantize.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._jax import explicit_mesh_of, rowwise
from ..arrays import encode
from ..formats import Format
from ..kernels import cpu


def has_round_trip(array: Float[Array, "..."], format: Format, axis) -> bool:
    """Return whether a native [`round_trip`][] is available."""
    return (
        array.ndim > 0
        and axis in (-1, array.ndim - 1)
        and explicit_mesh_of(array) is None
        and cpu.rounds(array, format)
    )


def round_trip(
    array: Float[Array, "*lead size"], format: Format
) -> tuple[Float[Array, "*lead size"], Bool[Array, "*lead"]]:
    """Quantize `array` along its last axis, and dequantize it.

    Also return whether a row contains values that cannot be quantized.
    """
    value, problems = _round_trip(array, format)
    return value, problems


def _by_codes(array, format: Format):
    q, problem = encode(array, format, (-1,))
    return q.dequantize(), jnp.broadcast_to(problem, array.shape[:-1])


def _native(array, format: Format):
    return cpu.round_trip(array, format=format)


_round_trip = rowwise("round_trip", _by_codes, _native)
