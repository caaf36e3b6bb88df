"""Which products get the kernel of `_triton.py`, and in what it multiplies."""

import dataclasses
import math
import os
from typing import Any

import jax.numpy as jnp

from ...formats import Format, GPUKernel, num_codes, Precision
from . import _check, _chips, _triton
from ._lookup import can_decode


# Up to so many rows the kernel is chosen. Beyond, XLA multiplies decoded tiles by the
# kernels of cuBLAS, which multiply faster than it decodes.
_most_rows = 128


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel for a product: on which chip, and what its tensor cores multiply."""

    chip: str
    operand: str
    parts: tuple[int, int]
    tiles: _triton.Tiles

    @property
    def name(self) -> str:
        rows = "few rows" if self.tiles.m == 16 else f"{self.tiles.m} rows"
        twice = {(1, 1): "", (2, 1): " twice", (2, 2): " three times"}[self.parts]
        return f"{rows}, {self.operand}{twice}"


def choose(
    x,
    codes,
    scales,
    *,
    format: Format,
    contract_rows: bool,
    precision: Precision,
    weight_dtype,
    **_,
) -> Kernel | str:
    """The kernel of a product, by the shapes and dtypes of what it gets; or why XLA
    multiplies."""
    asked = format.gpu or GPUKernel()
    if os.environ.get("EQQUANT_GPU") == "xla":
        return "EQQUANT_GPU=xla says so"
    if asked.kernel == "xla":
        return "the format asks for it"
    chip, kind, here = _chips.chip()
    if chip is None:
        return f"there are no kernels for {kind!r}"
    dtypes = tuple(jnp.dtype(dtype) for dtype in (x.dtype, weight_dtype))
    if not can_decode(format):
        return f"there are no kernels for codes like those of {format.name}"
    operands = _operands(dtypes, format, contract_rows, precision)
    if operands is None:
        what = "integers" if x.dtype == jnp.int8 else "float32"
        return f"the kernels do not multiply {what}"
    m, (*batch, rows, packed) = x.shape[-2], codes.shape
    if m > _most_rows and asked.kernel is None:
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
    )
    if tiles is None:
        return f"blocks of {format.block_size} are too short for tensor cores"
    kernel = Kernel(chip.name, *operands, tiles)
    if here and asked.check:
        failure = _check.failure_of(
            kind,
            kernel,
            format=dataclasses.replace(format, gpu=None),
            contract_rows=contract_rows,
            blocked=scales.shape[-1] > 1,
            dtypes=(*dtypes, jnp.dtype(scales.dtype)),
        )
        if failure:
            return f"the kernel failed its check on {kind!r}: {failure}"
    return kernel


def _operands(
    dtypes: tuple, format: Format, contract_rows: bool, precision: Precision
) -> tuple[str, tuple[int, int]] | None:
    """What is multiplied, and how many of these stand for a number of the activation
    and of the weight."""
    x, w = dtypes
    if x == jnp.int8:
        return None
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


def options_of(kernel: Kernel, format: Format, contract_rows: bool) -> dict[str, Any]:
    """Those of `_triton.dot`."""
    return dict(
        format=format,
        contract_rows=contract_rows,
        operand=jnp.dtype(kernel.operand),
        parts=kernel.parts,
        tiles=kernel.tiles,
    )


def bits_kept(kernel: Kernel, x, contract_rows: bool) -> int | None:
    """Of an activation; None for all."""
    if kernel.operand == "float16":
        return None
    if x.dtype == jnp.bfloat16 and not contract_rows:
        return None
    return 8 * kernel.parts[0]
