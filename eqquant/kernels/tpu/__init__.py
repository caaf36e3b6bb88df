"""Products with quantized weights on TPU: Pallas kernels that decode on the fly.

A tile of codes is decoded in vector memory and multiplied at once. Nothing is expanded
outside: codes enter as they are stored, scales too (TPUs keep a narrow matrix
transposed in memory, and the kernels read it that way), and only the activation, the
small operand, is permuted, split and padded.

What lies outside of an array in the last tile of an axis is undefined: the activation
is padded with zeros there, and scales are masked, as zero times NaN would not be zero.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, UInt8

from ...formats import Format, num_codes
from .._compute import Compute
from .._int8 import rounding
from . import _decode, _general, _tile_sizes
from ._chips import chip
from ._operands import choose_operands, kind_of
from ._round import round_rows
from ._weights import can_become, is_exact


round_int8 = round_rows


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
    interpret: bool = False,
) -> Float[Array, "*batch m out"]:
    """As that of `kernels/xla/`. Only where [`why_not`][] knows no reason."""
    variant = variant_of(
        x,
        codes,
        format=format,
        contract_rows=contract_rows,
        compute=compute,
        weight_dtype=weight_dtype,
    )
    kernel, _, rounded = variant.partition(", ")

    def flat(a):
        return a.reshape(-1, *a.shape[-2:])

    args = flat(x), flat(codes), flat(scales)
    options: dict[str, Any] = dict(
        format=format,
        out_dtype=out_dtype,
        chip=chip(compute.tpu),
        interpret=interpret,
    )
    x_unit = None if x_unit is None else flat(x_unit)
    if kernel == "decode":
        if x_unit is not None:
            options["out_dtype"] = jnp.float32
        out = _decode.contract_columns(
            *args,
            exact=rounded != "rounded",
            exact_table=not rounded,
            **options,
        )
        out = out if x_unit is None else out * x_unit
    else:
        out = _general.dot(
            *args,
            contract_rows=contract_rows,
            operand=jnp.dtype(kernel),
            exact_table=not rounded,
            x_unit=x_unit,
            **options,
        )
    return out.reshape(*x.shape[:-1], out.shape[-1]).astype(out_dtype)


def describe(x, codes, scales, **params) -> str:
    """The kernel that a product gets, in words, and how it rounds activations."""
    del scales
    variant = variant_of(x, codes, **params)
    kernel, _, rounded = variant.partition(", ")
    bits, operands = None, ""
    if kernel == "decode":
        format = params["format"]
        found = choose_operands(
            x.shape[-2],
            num_codes(codes.shape[-1], format.bits),
            x.dtype,
            format,
            exact=rounded != "rounded",
            exact_table=not rounded,
            chip=chip(params["compute"].tpu),
        )
        operands = f", weights as {found.weights}"
        bits = found.bits_kept(x.dtype)
    elif kernel == "bfloat16" and x.dtype != jnp.bfloat16:
        bits = 8
    return f"Pallas kernel, variant {variant!r}{operands} {rounding(x, bits)}"


def variant_of(
    x,
    codes,
    *,
    format: Format,
    contract_rows: bool,
    compute: Compute,
    weight_dtype,
    **_,
) -> str:
    """That of a product, by the shapes and dtypes of what it gets."""
    return choose_variant(
        format,
        compute,
        m=x.shape[-2],
        columns=num_codes(codes.shape[-1], format.bits),
        contract_rows=contract_rows,
        dtypes=(jnp.dtype(x.dtype), jnp.dtype(weight_dtype)),
    )


def choose_variant(
    format: Format,
    compute: Compute,
    *,
    m: int,
    columns: int,
    contract_rows: bool,
    dtypes: tuple,
) -> str:
    """Which kernel a product of `m` rows gets, by the dtypes of the activation and of
    the weight. Errors are relative (Frobenius norm), on normal activations and weights:

    - `"decode"`: for few rows. Activations keep 15 bits, and so does the NF4 table;
        other levels are exact. 4e-5; NF4 by bfloat16 2e-4.
    - `"decode, rounded table"`: the NF4 table rounded to int8. 6e-3.
    - `"decode, rounded"`: activations rounded to int8 or bfloat16, too. 1e-2.
    - `"float32"`: the matrix unit multiplies float32. 1e-6.
    - `"bfloat16"`: it multiplies what was decoded, rounded to bfloat16. 3e-3.
    - `"bfloat16, rounded table"`: the same with the NF4 table rounded to int8. 6e-3.
    - `"int8"`: for activations in int8 it multiplies integers. Exact but for the
        rounding of the result.
    """
    here, precision = chip(compute.tpu), compute.precision
    requested = here.options
    x_dtype, _ = dtypes
    floats = jnp.bfloat16 not in dtypes
    few = not contract_rows and _decode.fits(m, columns, format, here)
    decodes = few and precision != "highest" and requested.kernel != "general"

    exact_table = requested.exact_table
    if exact_table is None:
        # To look up twice is not within a tenth of the fastest, but where the chip has
        # to do so anyway, or products hide it.
        twice = kind_of(format, x_dtype, False, here) == "float8"
        hidden = twice if decodes else m >= 1024
        exact_table = precision == "highest" or (
            precision == "high" and (floats or hidden)
        )
    looked_up = format.codebook is not None and can_become("int8", format, here)
    rounds = looked_up and not exact_table and not is_exact(format)
    rounded = ", rounded table" if rounds else ""
    if decodes:
        return "decode" + (", rounded" if precision == "default" else rounded)

    if x_dtype == jnp.int8:
        integers = format.integer_levels and format.block_size is None
        if integers and not contract_rows:
            return "int8" if here.int8 else "bfloat16"
    return "float32" if floats and precision != "default" else "bfloat16" + rounded


def why_not(x, codes, scales, *, format: Format, weight_dtype, **_) -> str | None:
    """Why a product has no kernel, if it has none."""
    for dtype in (x.dtype, weight_dtype, scales.dtype):
        if jnp.dtype(dtype).itemsize > 4:
            return f"kernels for TPU compute in float32 at most, not in {dtype}"
    if 0 in (*x.shape, *codes.shape):
        return "there is nothing to multiply"
    if format.bits == 8 and not (format.integer_levels or format.float8):
        return f"there are no kernels for TPU for codes like those of {format.name}"
    if format.bits == 3 and format.group % 32:
        return f"blocks of {format.block_size} are no whole words"
    if not _tile_sizes.fits(codes.shape[-1], format):
        return f"blocks of {format.block_size} are too long for a tile"
    return None
