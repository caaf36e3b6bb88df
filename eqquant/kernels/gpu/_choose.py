"""Which products get a kernel, which one, and in what it multiplies."""

import math
import os

import jax.numpy as jnp

from ...formats import Format, num_codes
from .._compute import Compute, GPUKernel, Precision
from ..xla import longest_int8_sum
from . import _check, _chips, _pipeline
from ._kernel import Kernel as Kernel
from ._lookup import can_decode
from ._parts import is_exact


# Up to so many rows the kernel is chosen. Beyond, XLA multiplies decoded tiles by the
# kernels of cuBLAS, which multiply faster than it decodes; but for what it decodes in a
# few instructions, or not at all, and where tensor cores are slow.
_most_rows = 128


def choose(
    x,
    codes,
    scales,
    *,
    format: Format,
    contract_rows: bool,
    compute: Compute,
    weight_dtype,
    out_dtype=None,
    **_,
) -> Kernel | str:
    """The kernel of a product, by the shapes and dtypes of what it gets; or why XLA
    multiplies."""
    requested = compute.gpu or GPUKernel()
    if os.environ.get("EQQUANT_GPU") == "xla":
        return "EQQUANT_GPU=xla says so"
    if requested.kernel == "xla":
        return "compute.gpu requests it"
    chip, kind, here = _chips.chip()
    if chip is None:
        return f"there are no kernels for {kind!r}"
    kernel = kernel_on(
        chip,
        x,
        codes,
        scales,
        format=format,
        contract_rows=contract_rows,
        compute=compute,
        weight_dtype=weight_dtype,
        out_dtype=out_dtype,
    )
    if here and requested.check and isinstance(kernel, Kernel):
        failure = _check.failure_of(
            kind,
            kernel,
            format=format,
            contract_rows=contract_rows,
            blocked=scales.shape[-1] > 1,
            dtypes=tuple(map(jnp.dtype, (x.dtype, weight_dtype, scales.dtype))),
        )
        if failure:
            return f"the kernel failed its check on {kind!r}: {failure}"
    return kernel


def kernel_on(
    chip: _chips.Chip,
    x,
    codes,
    scales,
    *,
    format: Format,
    contract_rows: bool,
    compute: Compute,
    weight_dtype,
    out_dtype=None,
) -> Kernel | str:
    """That of a chip, or why XLA multiplies there."""
    dtypes = tuple(jnp.dtype(dtype) for dtype in (x.dtype, weight_dtype))
    if not can_decode(format):
        return f"there are no kernels for codes like those of {format.name}"
    if x.dtype == jnp.int8:
        if reason := _no_integers(x, scales, format, contract_rows):
            return reason
        operands = "int8", (1, 1)
    else:
        operands = _operands(dtypes, format, contract_rows, compute.precision)
        if operands is None:
            return "the kernels do not multiply float32"
    m, (*batch, rows, packed) = x.shape[-2], codes.shape
    operand, parts = operands
    as_it_is = None
    if x.dtype == jnp.dtype(operand) and parts == (1, 1) and not contract_rows:
        as_it_is = operand
    requested = (compute.gpu or GPUKernel()).kernel
    hopper = "it is for many rows on Hopper, with activations of 8 or 16 bits"
    if as_it_is is not None and chip.large_products and requested != "triton":
        hopper = _pipeline.why_not(x, codes, scales, format, out_dtype, chip.shared)
        if hopper is None and (m > _most_rows or requested == "mosaic"):
            cut = _pipeline.pipeline_for(x, chip.cores)
            return Kernel(chip.name, operand, parts, cut)
    if requested == "mosaic":
        return f"compute.gpu requests Mosaic: {hopper}"
    forced = requested == "triton"
    large = _chips.is_large(chip, m, format, as_it_is)
    narrow = as_it_is if dtypes[0] == dtypes[1] else None
    hides = _chips.hides_decoding(chip, m, format, narrow)
    many = large or hides or (as_it_is == "int8" and not chip.fast_memory)
    if m > _most_rows and not (many or forced):
        return f"of more than {_most_rows} rows it is expected to be faster"
    count = math.prod(batch)
    out = num_codes(packed, format.bits) if contract_rows else rows
    if max(x.size, codes.size, count * m * out) >= 2**31 or count >= 2**16:
        return "the kernels count in 32 bits, and weights of a stack in 16"
    tiles = _chips.tiles_for(
        chip,
        m,
        rows,
        packed,
        batch=count,
        format=format,
        contract_rows=contract_rows,
        itemsize=x.dtype.itemsize,
        as_it_is=as_it_is,
        hides=hides,
    )
    if tiles is None:
        return f"blocks of {format.block_size} are too short for tensor cores"
    return Kernel(chip.name, operand, parts, tiles)


def _operands(
    dtypes: tuple, format: Format, contract_rows: bool, precision: Precision
) -> tuple[str, tuple[int, int]] | None:
    """What is multiplied, and how many of these stand for a number of the activation
    and of the weight."""
    x, w = dtypes
    # Scaled, an activation in float16 may be too small for it.
    if x == w == jnp.float16 and not contract_rows:
        return "float16", (1, 1)
    narrow = x == w == jnp.bfloat16
    if precision == "default" or narrow:
        return "bfloat16", (1, 1)
    if precision == "highest":
        return None
    holds = x == jnp.bfloat16 and not contract_rows
    parts = 1 if holds and format.integer_levels else 2
    return "bfloat16", (parts, 1 if format.integer_levels else 2)


def _no_integers(x, scales, format: Format, contract_rows: bool) -> str | None:
    """Why an activation in int8 is not multiplied as it is, if it is not."""
    if contract_rows or format.bits != 8 or not is_exact(scales.shape[-1], format):
        return "the kernels multiply integers with whole rows of int8 only"
    if x.shape[-1] > longest_int8_sum:
        return f"sums of {x.shape[-1]} products may not fit in int32"
    return None


def bits_kept(kernel: Kernel, x, contract_rows: bool) -> int | None:
    """Of an activation; None for all."""
    if kernel.operand == "float16":
        return None
    if x.dtype == jnp.bfloat16 and not contract_rows:
        return None
    return 8 * kernel.parts[0]
