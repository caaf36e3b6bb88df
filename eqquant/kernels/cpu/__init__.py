"""Products with quantized weights on CPUs: native kernels.

Codes are decoded in registers, by a table lookup, and used at once. The library,
`src/`, is plain C++, which XLA calls through its foreign function interface and lends
its own threads. Nothing in it knows a format: it gets the levels of one as a table.
"""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, UInt8

from ...formats import Format, num_codes
from .._compute import Compute
from .._int8 import round_int8 as round_int8
from ._choose import (
    choose_kernel as choose_kernel,
    describe as describe,
    run_of,
    why_not as why_not,
)
from ._encode import encode as encode, encodes as encodes
from ._library import load, status as status
from ._round import round_trip as round_trip, rounds as rounds


# Of floats of 8 bits.
_exponent_bits = {None: 0, "e4m3fn": 4, "e5m2": 5}


def dot(
    x: Float[Array, "*batch m size"] | Int8[Array, "*batch m size"],
    codes: UInt8[Array, "*batch rows packed"] | Int8[Array, "*batch rows packed"],
    scales: Float[Array, "*batch rows blocks"],
    *,
    format: Format,
    contract_rows: bool,
    compute: Compute,
    weight_dtype,
    out_dtype,
    x_unit: Float[Array, "*batch m 1"] | None = None,
    kernel: str | None = None,
) -> Float[Array, "*batch m out"]:
    """As that of `kernels/xla/`. Only where [`why_not`][] knows no reason."""
    library = load()
    assert not isinstance(library, str), library
    if kernel is None:
        kernel = choose_kernel(
            x,
            codes,
            scales,
            format=format,
            contract_rows=contract_rows,
            compute=compute,
            weight_dtype=weight_dtype,
        )
        assert kernel is not None
    *batch, rows, packed = codes.shape
    m = x.shape[-2]
    columns = num_codes(packed, format.bits)
    run = run_of(packed, format)
    if x.dtype != jnp.bfloat16:  # Of which the kernels read the rows as they are.
        x = x.astype(jnp.float32)
    scratch = library.scratch(
        kernel.encode(),
        contract_rows,
        x.dtype == jnp.bfloat16,
        m,
        rows,
        packed,
        scales.shape[-1],
        run,
        format.bits,
    )
    out = (*batch, m, columns if contract_rows else rows)
    results = (
        jax.ShapeDtypeStruct(out, jnp.float32),
        # Of the kernel, but XLA's to allocate and to account for.
        jax.ShapeDtypeStruct((max(scratch, 1),), jnp.uint8),
    )
    # The kernels take the floats of four bits of exponent for too small, by 2**8.
    if format.float8 == "e4m3fn":
        scales = scales * jnp.asarray(2**8, scales.dtype)
    product, _ = jax.ffi.ffi_call("eqquant_dot", results)(
        x,
        codes,
        scales,
        _levels(format),
        kernel=kernel,
        bits=np.int64(format.bits),
        exponent=np.int64(_exponent_bits[format.float8]),
        run=np.int64(run),
        level_unit=np.float32(_level_unit(format)),
        contract_rows=contract_rows,
    )
    if x_unit is not None:
        product = product * x_unit
    return product.astype(out_dtype)


def _levels(format: Format) -> Float[Array, "16"]:
    """Of every value of four bits; a narrower code is the lowest of these."""
    if format.bits == 8:
        # Such codes stand for themselves. Not all are alike, or XLA would compile a
        # kernel that makes them.
        return jnp.asarray(np.eye(1, 16, dtype=np.float32)[0])
    if type(format).levels is Format.levels:  # To trace them takes as long as all else.
        return jnp.asarray(np.resize(np.asarray(format.codebook, np.float32), 16))
    codes = jnp.arange(16, dtype=jnp.uint8) & jnp.uint8(2**format.bits - 1)
    return format.levels(codes, jnp.float32)


def _level_unit(format: Format) -> float:
    """What the levels are integers of, exactly or nearly; 0 if that is not known."""
    if format.integer_levels:
        return 1.0
    if format.codebook is None or type(format).levels is not Format.levels:
        return 0.0
    return _unit_of(tuple(map(float, format.codebook)))


@ft.cache
def _unit_of(levels: tuple[float, ...]) -> float:
    """The largest level is up to 2**14 of it. Rounding to it changes the levels least,
    and the sum of many even less."""
    table = np.asarray(levels)
    largest = np.max(np.abs(table))
    if not 0 < largest < np.inf:
        return 0.0
    units = largest / np.arange(2**13, 2**14)[:, None]
    errors = np.round(table / units) * units - table
    worst = np.square(errors).mean(-1) + 2**8 * np.square(errors.mean(-1))
    return float(units[np.argmin(worst), 0])
