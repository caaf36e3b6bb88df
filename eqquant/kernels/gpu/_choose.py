"""The choice of the Pallas kernel for a product on GPUs."""

import math
import os

import jax.numpy as jnp

from .._compute import GPUKernel
from .._int8_sums import longest_int8_sum
from .._product import Product
from . import _check, _chips, _pipeline
from ._kernel import TensorCoreKernel as TensorCoreKernel
from ._lookup import can_decode


# Up to this number of rows, the kernel is chosen. For more rows, XLA multiplies decoded
# tiles by cuBLAS kernels, which are faster. The exceptions are codes that are decoded
# in few instructions or not at all, and chips with slow tensor cores.
_most_rows = 128


def choose(product: Product) -> TensorCoreKernel | str:
    """Return the kernel of a product, or why XLA multiplies."""
    requested = product.compute.gpu or GPUKernel()
    if os.environ.get("EQQUANT_GPU") == "xla":
        return "EQQUANT_GPU=xla requests it"
    if requested.kernel == "xla":
        return "compute.gpu requests it"
    chip, kind, here = _chips.chip()
    if chip is None:
        return f"there are no kernels for {kind!r}"
    kernel = kernel_on(chip, product)
    if isinstance(kernel, str) or not (here and requested.check):
        return kernel
    failure = _check.failure_of(kind, kernel, product)
    return f"the kernel failed its check on {kind!r}: {failure}" if failure else kernel


def kernel_on(chip: _chips.Chip, product: Product) -> TensorCoreKernel | str:
    """Return the kernel of a product on a chip, or why XLA multiplies there."""
    format = product.format
    if not can_decode(format):
        return f"there are no kernels for codes like those of {format.name}"
    if product.is_int8:
        if reason := _no_integers(product):
            return reason
        operands = "int8", (1, 1)
    else:
        operands = _operands(product)
        if operands is None:
            return "the kernels do not multiply float32"
    operand, parts = operands
    # The operand, if it is the dtype of the activation.
    native = None
    if product.x.dtype == jnp.dtype(operand) and parts == (1, 1):
        native = None if product.contract_rows else operand
    requested = (product.compute.gpu or GPUKernel()).kernel
    hopper = "it is for many rows on Hopper, with activations of 8 or 16 bits"
    if native is not None and chip.large_products and requested != "triton":
        hopper = _pipeline.why_not(product, chip.shared)
        # The tiles of this kernel have 256 rows, most of which may be empty.
        few = _most_rows if native == "int8" else _most_rows // 2
        if hopper is None and (product.m > few or requested == "mosaic"):
            pipeline = _pipeline.pipeline_for(format, product.x.dtype, chip.cores)
            return TensorCoreKernel(chip.name, operand, parts, pipeline)
    if requested == "mosaic":
        return f"compute.gpu requests Mosaic: {hopper}"
    hides = _chips.hides_decoding(chip, product, native)
    large = _chips.is_large(chip, product, native)
    is_fast = large or hides or (native == "int8" and not chip.fast_memory)
    most = _most_rows
    if product.contract_rows and (chip.large_products or format.history):
        # On an H200, 128 rows take up to five times as long as by XLA. Sums of all
        # codes of a word take as many registers.
        most //= 2
    if product.m > most and not (is_fast or requested == "triton"):
        return f"XLA is expected to be faster for more than {most} rows"
    count = math.prod(product.batch)
    sizes = math.prod(product.x.shape), math.prod(product.codes.shape)
    if max(*sizes, count * product.m * product.free) >= 2**31 or count >= 2**16:
        return "the kernels count in 32 bits, and weights of a stack in 16"
    tiles = _chips.tiles_for(chip, product, native, parts)
    if tiles is None:
        if format.history:
            return f"blocks of {format.block_size} are no multiple of 16 words"
        return f"blocks of {format.block_size} are too short for tensor cores"
    return TensorCoreKernel(chip.name, operand, parts, tiles)


def _operands(product: Product) -> tuple[str, tuple[int, int]] | None:
    """Return the dtype that is multiplied, and how many such numbers represent a number
    of the activation and of the weight."""
    x, format, contract_rows = product.x.dtype, product.format, product.contract_rows
    # A scaled float16 activation may underflow.
    if product.is_all("float16") and not contract_rows:
        return "float16", (1, 1)
    if product.precision == "default" or product.is_all("bfloat16"):
        return "bfloat16", (1, 1)
    if product.precision == "highest":
        return None
    holds = x == jnp.bfloat16 and not contract_rows
    parts = 1 if holds and format.integer_levels else 2
    return "bfloat16", (parts, 1 if format.integer_levels else 2)


def _no_integers(product: Product) -> str | None:
    """Return why an int8 activation is not multiplied in int8."""
    is_int8 = product.has_integer_rows and product.format.bits == 8
    if product.contract_rows or not is_int8:
        return "the kernels multiply integers with whole rows of int8 only"
    if product.size > longest_int8_sum:
        return f"sums of {product.size} products may not fit in int32"
    return None


def bits_kept(kernel: TensorCoreKernel, product: Product) -> int | None:
    """Return the number of bits of an activation that a kernel keeps; None for all."""
    if kernel.operand == "float16":
        return None
    if product.x.dtype == jnp.bfloat16 and not product.contract_rows:
        return None
    return 8 * kernel.parts[0]
