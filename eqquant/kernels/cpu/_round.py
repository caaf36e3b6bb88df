"""Round on CPUs, by native kernels that read and write an array once."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int8 as Int8Array

from ...formats import Binary, Format, Int8, largest_scale, NF4, Ternary
from ._library import load


# The kinds of `src/round.h`. The keys are classes, not names: a subclass inherits the
# name, but may encode differently.
_int8, _table, _ternary, _binary = map(np.int64, range(4))
_kinds = {Int8: _int8, NF4: _table, Ternary: _ternary, Binary: _binary}


def rounds(array: Float[Array, "..."], format: Format) -> bool:
    """Return whether [`round_trip`][] supports an array: float32 with whole blocks."""
    kind = _kinds.get(type(format))
    return (
        not isinstance(load(), str)
        and kind is not None
        and not (format.shares or format.quantized_scales or format.has_offsets)
        and array.dtype == format.scale_dtype == np.float32
        and array.size > 0
        and array.shape[-1] % (format.block_size or 1) == 0
    )


def round_trip(
    array: Float[Array, "*lead size"], *, format: Format
) -> tuple[Float[Array, "*lead size"], Bool[Array, "*lead"]]:
    """Return the dequantized array, and whether each row has a value that is not
    finite. The result is bit-identical to `quantize` and `dequantize`."""
    *lead, size = array.shape
    rows, kind = math.prod(lead), _kinds[type(format)]
    library, table = load(), kind == _table
    assert not isinstance(library, str), library
    largest = largest_scale(
        np.float32, float(np.finfo(np.float32).max), format.largest_level
    )
    values, problems = jax.ffi.ffi_call(
        "eqquant_round",
        (
            jax.ShapeDtypeStruct((rows, size), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.bool_),
        ),
    )(
        array.reshape(rows, size),
        jnp.asarray(format.boundaries if table else jnp.zeros(15), jnp.float32),
        jnp.asarray(format.codebook if table else jnp.zeros(16), jnp.float32),
        kind=kind,
        block=np.int64(format.block_size or size),
        largest_scale=np.float32(largest),
        by_deviation=isinstance(format, Ternary) and format.rule == "threshold",
        least_squares=isinstance(format, Ternary) and format.least_squares,
        instructions=np.int64(len(library.instructions)),
    )
    return values.reshape(array.shape), problems.reshape(lead)


def round_rows(
    x: Float[Array, "*lead size"],
) -> tuple[Int8Array[Array, "*lead size"], Float[Array, "*lead 1"]]:
    """Round float32 rows to int8, with one scale per row. The native library must be
    available."""
    *lead, size = x.shape
    rows, library = math.prod(lead), load()
    assert not isinstance(library, str), library
    codes, scales = jax.ffi.ffi_call(
        "eqquant_round_int8",
        (
            jax.ShapeDtypeStruct((rows, size), jnp.int8),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
    )(x.reshape(rows, size), instructions=np.int64(len(library.instructions)))
    return codes.reshape(x.shape), scales.reshape(*lead, 1)
