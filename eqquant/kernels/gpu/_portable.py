"""Products with quantized weights on GPUs, in what XLA makes good kernels of.

A GPU pays for each kernel that it starts, and for each byte: so there are few of both.
Either codes are decoded inside of the kernel that multiplies, or in tiles that are as
large as its cache, one kernel for each.
"""

import functools as ft
import os
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, UInt8

from ...formats import Format, num_codes
from .._compute import Compute
from .._int8 import round_int8 as round_int8, rounding
from ..xla import longest_int8_sum
from . import _fused, _reduce, _tiles
from ._parts import is_exact, num_parts


# Up to so many rows the arithmetic of a sum costs less than a decoded weight.
_few = 4


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
) -> Float[Array, "*batch m out"]:
    """As that of `kernels/xla/`. Only where [`why_not`][] knows no reason."""
    options: dict[str, Any] = dict(
        format=format,
        contract_rows=contract_rows,
        compute=compute,
        weight_dtype=weight_dtype,
    )
    variant, operand = variant_of(x, codes, scales, **options).split(", ")
    wide = jnp.float32 if x_unit is not None else out_dtype
    if variant == "reduce":
        one = ft.partial(_reduce.dot, format=format, out_dtype=wide)
    else:
        by = _fused.dot if variant == "fused" else _tiles.dot
        parts = _parts_of(x, scales, **options)
        one = ft.partial(
            by,
            format=format,
            contract_rows=contract_rows,
            operand=operand,
            parts=parts,
            out_dtype=wide,
        )
    *batch, _, _ = codes.shape
    if not batch:
        out = one(x, codes, scales)
    else:
        flat = [a.reshape(-1, *a.shape[-2:]) for a in (x, codes, scales)]
        if len(flat[1]) == 1:
            out = one(*(a[0] for a in flat))
        elif variant == "tiles":
            # One after the other: only one weight's tile is decoded at a time.
            out = jax.lax.map(lambda args: one(*args), tuple(flat))
        else:
            out = jax.vmap(one)(*flat)
        out = out.reshape(*batch, *out.shape[-2:])
    return (out if x_unit is None else out * x_unit).astype(out_dtype)


def variant_of(
    x,
    codes,
    scales,
    *,
    format: Format,
    contract_rows: bool,
    compute: Compute,
    weight_dtype,
    **_,
) -> str:
    """How a product is computed, by the shapes and dtypes of what it gets, and what is
    multiplied. Errors are relative (Frobenius norm), on normal activations and weights:

    - `"reduce, float32"`: for few rows. One kernel reads the codes, looks their levels
        up and sums in float32. 6e-7.
    - `"fused, ..."`: for codes that are integers of 8 bits, with a scale for each row.
        The product itself reads and converts them.
    - `"tiles, ..."`: a tile of the weight is decoded, and multiplied.

    Of the operands:

    - `"float32"`: 6e-7.
    - `"bfloat16"`: activations, or scaled weights, that bfloat16 does not hold are two
        of it, so that they keep 16 bits: 5e-6. They are one, and the error is 3e-3, if
        the precision is `"default"`, or if both are bfloat16 anyway.
    - `"float16"`: for activations and weights in float16. 4e-4.
    - `"int8"`: for activations in int8. Exact, but for the result.
    """
    x_dtype, weight_dtype = jnp.dtype(x.dtype), jnp.dtype(weight_dtype)
    whole = is_exact(scales.shape[-1], format)
    if x.shape[-2] <= _few and not contract_rows and format.bits != 3:
        return "reduce, float32"
    how = "fused" if whole and format.bits == 8 else "tiles"
    fits = x.shape[-1] <= longest_int8_sum
    if x_dtype == jnp.int8 and whole and fits and not contract_rows:
        return f"{how}, int8"
    # Scaled, an activation in float16 may be too small for it.
    scaled = whole and contract_rows
    if x_dtype == weight_dtype == jnp.float16 and not scaled:
        return f"{how}, float16"
    narrow = x_dtype == weight_dtype == jnp.bfloat16
    if compute.precision == "highest" and not narrow:
        return f"{how}, float32"
    return f"{how}, bfloat16"


def _parts_of(
    x, scales, *, format, contract_rows, compute, weight_dtype, **_
) -> tuple[int, int]:
    return num_parts(
        x.dtype,
        weight_dtype,
        exact=is_exact(scales.shape[-1], format),
        contract_rows=contract_rows,
        precision=compute.precision,
    )


def describe(x, codes, scales, **params) -> str:
    """How a product is computed, in words, and how it rounds activations."""
    variant = variant_of(x, codes, scales, **params)
    bits = None
    scaled = params["contract_rows"] and is_exact(scales.shape[-1], params["format"])
    holds = x.dtype == jnp.bfloat16 or x.dtype == jnp.int8
    if variant.endswith("bfloat16") and (scaled or not holds):
        bits = 8 * _parts_of(x, scales, **params)[0]
    return f"XLA for GPUs, variant {variant!r} {rounding(x, bits)}"


def why_nothing(x, codes, scales, *, weight_dtype, **_) -> str | None:
    """Why nothing that is made for GPUs computes a product, if that is so."""
    if os.environ.get("EQQUANT_GPU") == "off":
        return "EQQUANT_GPU=off says so"
    for dtype in (x.dtype, weight_dtype, scales.dtype):
        if jnp.dtype(dtype).itemsize > 4:
            return f"the lowering for GPUs computes in float32 at most, not in {dtype}"
    if 0 in (*x.shape, *codes.shape):
        return "there is nothing to multiply"
    return None


def why_not(
    x, codes, scales, *, format: Format, weight_dtype, contract_rows: bool, **params
) -> str | None:
    """Why a product is not computed in these ways, if it is not."""
    reason = why_nothing(x, codes, scales, weight_dtype=weight_dtype)
    if reason:
        return reason
    params |= dict(
        format=format, weight_dtype=weight_dtype, contract_rows=contract_rows
    )
    if contract_rows and variant_of(x, codes, scales, **params).startswith("tiles"):
        columns, blocks = num_codes(codes.shape[-1], format.bits), scales.shape[-1]
        if 2 * _tiles.step_of(columns, blocks, format) > columns:
            return "a tile of whole blocks, or groups of codes, would be all of it"
    return None
