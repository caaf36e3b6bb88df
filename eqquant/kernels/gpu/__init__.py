"""Products with quantized weights on GPUs.

On chips that are known, a kernel of Pallas and Triton decodes codes into registers, and
multiplies them with tensor cores, or integers as they are. Of many rows, on Hopper, one
of Mosaic decodes while tensor cores multiply. Whatever these do not serve, and what is
exported, is left to `portable`: XLA, in what it makes good kernels of.
"""

from jaxtyping import Array, Float, Int8, UInt8

from .._int8 import round_int8 as round_int8, rounding
from . import _portable as portable
from ._choose import bits_kept, choose
from ._lookup import how


def dot(
    x: Float[Array, "*batch m size"] | Int8[Array, "*batch m size"],
    codes: UInt8[Array, "*batch rows packed"] | Int8[Array, "*batch rows packed"],
    scales: Float[Array, "*batch rows blocks"],
    *,
    out_dtype,
    x_unit: Float[Array, "*batch m 1"] | None = None,
    interpret: bool = False,
    **params,
) -> Float[Array, "*batch m out"]:
    """As that of `kernels/xla/`. Only where [`why_not`][] knows no reason."""
    kernel = choose(x, codes, scales, out_dtype=out_dtype, **params)
    if isinstance(kernel, str):
        return portable.dot(
            x, codes, scales, out_dtype=out_dtype, x_unit=x_unit, **params
        )
    arrays = (x, codes, scales) if x_unit is None else (x, codes, scales, x_unit)
    args = [a.reshape(-1, *a.shape[-2:]) for a in arrays]
    out = kernel.dot(
        *args,
        format=params["format"],
        contract_rows=params["contract_rows"],
        out_dtype=out_dtype,
        interpret=interpret,
    )
    return out.reshape(*x.shape[:-1], out.shape[-1])


def why_not(x, codes, scales, **params) -> str | None:
    """Why a product is left to the lowering for all platforms, if it is."""
    reason = portable.why_nothing(x, codes, scales, **params)
    if reason is None and isinstance(choose(x, codes, scales, **params), str):
        reason = portable.why_not(x, codes, scales, **params)
    return reason


def describe(x, codes, scales, **params) -> str:
    """How a product is computed, in words, and how it rounds activations."""
    kernel = choose(x, codes, scales, **params)
    if isinstance(kernel, str):
        return f"{portable.describe(x, codes, scales, **params)}, as {kernel}"
    bits = bits_kept(kernel, x, params["contract_rows"])
    rounded, decoded = rounding(x, bits), how(params["format"])
    if kernel.scales_weights:
        decoded += " and scaled"
    return f"{kernel.by} kernel for {kernel.chip}, {kernel.name} {rounded}, {decoded}"


def variant_of(x, codes, scales, **params) -> str:
    """That of the kernel, or of `portable`."""
    kernel = choose(x, codes, scales, **params)
    if isinstance(kernel, str):
        return portable.variant_of(x, codes, scales, **params)
    return kernel.name
