"""Products with quantized weights on TPU: Pallas kernels that decode on the fly.

A tile of codes is decoded in vector memory and multiplied at once. Nothing is expanded
outside: codes enter as they are stored, scales too (TPUs keep a narrow matrix
transposed in memory, and the kernels read it that way), and only the activation, the
small operand, is permuted, split and padded.

What lies outside of an array in the last tile of an axis is undefined: the activation
is padded with zeros there, and scales are masked, as zero times NaN would not be zero.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, UInt8

from ...formats import Format, Precision
from . import _decode, _general
from ._chips import chip


def dot(
    x: Float[Array, "*batch m size"],
    codes: UInt8[Array, "*batch rows packed"] | Int8[Array, "*batch rows packed"],
    scales: Float[Array, "*batch rows blocks"],
    *,
    format: Format,
    contract_rows: bool,
    precision: Precision,
    weight_dtype,
    out_dtype,
    interpret: bool = False,
) -> Float[Array, "*batch m out"]:
    """As that of `kernels/xla.py`. Only where [`why_not`][] knows no reason."""
    variant = variant_of(
        x,
        codes,
        format=format,
        contract_rows=contract_rows,
        precision=precision,
        weight_dtype=weight_dtype,
    )

    def flat(a):
        return a.reshape(-1, *a.shape[-2:])

    args = flat(x), flat(codes), flat(scales)
    if variant in ("decode", "decode, rounded"):
        out = _decode.contract_columns(
            *args,
            format=format,
            exact=variant == "decode",
            chip=chip(),
            interpret=interpret,
        )
    else:
        kernel = _general.contract_rows if contract_rows else _general.contract_columns
        operand = jnp.float32 if variant == "float32" else jnp.bfloat16
        out = kernel(
            *args, format=format, operand=operand, chip=chip(), interpret=interpret
        )
    return out.reshape(*x.shape[:-1], out.shape[-1]).astype(out_dtype)


def variant_of(
    x,
    codes,
    *,
    format: Format,
    contract_rows: bool,
    precision: Precision,
    weight_dtype,
    **_,
) -> str:
    """That of a product, by the shapes and dtypes of what it gets."""
    return choose_variant(
        format,
        precision,
        m=x.shape[-2],
        columns=codes.shape[-1] * 8 // format.bits,
        contract_rows=contract_rows,
        dtypes=(x.dtype, weight_dtype),
    )


def choose_variant(
    format: Format,
    precision: Precision,
    *,
    m: int,
    columns: int,
    contract_rows: bool,
    dtypes: tuple,
) -> str:
    """Which kernel a product of `m` rows gets. Errors are relative (Frobenius norm), on
    normal activations and weights:

    - `"decode"`: for few rows. Activations keep 15 bits, and so does the NF4 table;
        other levels are exact. 4e-5.
    - `"decode, rounded"`: activations rounded to int8, and the NF4 table. 1e-2.
    - `"float32"`: the matrix unit multiplies float32. 1e-6.
    - `"bfloat16"`: it multiplies what was decoded, rounded to bfloat16. 3e-3.
    """
    if (
        precision != "highest"
        and not contract_rows
        and _decode.fits(m, columns, format)
    ):
        return "decode" if precision == "high" else "decode, rounded"
    exact = all(jnp.dtype(dtype) != jnp.bfloat16 for dtype in dtypes)
    return "float32" if exact and precision != "default" else "bfloat16"


def why_not(x, codes, scales, *, format: Format, weight_dtype, **_) -> str | None:
    """Why a product has no kernel, if it has none."""
    for dtype in (x.dtype, weight_dtype, scales.dtype):
        if jnp.dtype(dtype).itemsize > 4:
            return f"kernels for TPU compute in float32 at most, not in {dtype}"
    if 0 in (*x.shape, *codes.shape):
        return "there is nothing to multiply"
    if not _general.fits(codes.shape[-1], codes.shape[-2], format):
        return f"blocks of {format.block_size} are too long for a tile"
    return None
