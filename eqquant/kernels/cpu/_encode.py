"""Quantize on CPUs, by a native kernel."""

import functools as ft
import math
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt8

from ...formats import FittedFormat, Format
from ._library import load


def encodes(array: Float[Array, "..."], format: Format) -> bool:
    """Return whether [`encode`][] supports an array: float32 with whole blocks."""
    library = load()
    return (
        not isinstance(library, str)
        and "avx512" in library.instructions
        and format.boundaries is not None
        and len(format.boundaries) == 15
        and _are_close(format.shares, format.boundaries)
        and format.block_size is not None
        and format.block_size % 32 == 0
        and array.size > 0
        and array.shape[-1] % format.block_size == 0
        and array.dtype == format.scale_dtype == np.float32
    )


@ft.cache
def _are_close(shares: tuple[float, ...], boundaries: tuple[float, ...]) -> bool:
    """Return whether codes change by at most one from a share to the next one."""
    steps = [b / a for a, b in pairwise(shares)]
    up = [b for b in boundaries if b >= 0]
    down = [-b for b in reversed(boundaries) if b <= 0]
    if not steps:
        return not shares
    if not (up and down and up[0] and down[0]):
        return False
    most = 1.001 * max(steps)
    return all(b / a > most for side in (up, down) for a, b in pairwise(side))


def encode(
    array: Float[Array, "*lead size"], *, format: Format
) -> tuple[UInt8[Array, "*lead packed"], Any, Bool[Array, "*lead"]]:
    """Return codes, scales, and whether each row has a value that is not finite. The
    result is bit-identical to `format.encode`."""
    codes, scales, problems = _encode(array, None, format)
    if format.quantized_scales:
        assert isinstance(format, FittedFormat)
        scales = format.stored_scales(scales, float(np.finfo(np.float32).max))
        codes, _, _ = _encode(array, scales.astype(jnp.float32), format)
    return codes, scales, problems


def _encode(array, given, format: Format):
    """Encode, with the scales `given` unless they are None."""
    *lead, size = array.shape
    block, boundaries = format.block_size, format.boundaries
    assert block is not None and boundaries is not None
    rows, blocks = math.prod(lead), size // block
    codes, scales, problems = jax.ffi.ffi_call(
        "eqquant_encode",
        (
            jax.ShapeDtypeStruct((rows, size // 2), jnp.uint8),
            jax.ShapeDtypeStruct((rows, blocks), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.bool_),
        ),
    )(
        array.reshape(rows, size),
        jnp.asarray([*boundaries, jnp.inf], jnp.float32),
        jnp.asarray(format.codebook, jnp.float32),
        jnp.zeros(1, jnp.float32) if given is None else given.reshape(rows, blocks),
        block=np.int64(block),
        is_given=given is not None,
        shares=np.asarray(() if given is not None else format.shares, np.float32),
    )
    codes, scales = codes.reshape(*lead, -1), scales.reshape(*lead, -1)
    return codes, scales, problems.reshape(lead)
