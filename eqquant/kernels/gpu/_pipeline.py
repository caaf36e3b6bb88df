"""Tiles of the Mosaic kernel, its shared memory, and the products that it supports."""

import dataclasses

import jax.numpy as jnp

from ...formats import Format, is_in_two_parts
from .._product import Product
from ._lookup import in_table, table_bytes


LINE = 128  # Bytes per row of the activation and step.
STEP = LINE // 2  # Columns of the weight per step, or half of them for integers.


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Tile sizes of the Mosaic kernel.

    - `m`: rows of the activation in a tile.
    - `rows`: rows of the weight in a tile.
    - `stages`: pipeline steps in shared memory.
    - `cluster`: programs that share rows of the activation.
    - `cores`: the maximum number of programs.
    """

    m: int = 256
    rows: int = 128
    stages: int = 4
    cluster: int = 2
    cores: int = 132


def pipeline_for(format: Format, dtype, cores: int) -> Pipeline:
    """Return the tiles for a format and activations of a dtype.

    Steps of int8 have twice the codes, so fewer fit in shared memory. Programs that
    decode by a table are slower, and share the activation.
    """
    stages, cluster = 3 if dtype == jnp.int8 else 4, 2 if in_table(format) else 1
    return Pipeline(cores=cores, stages=stages, cluster=cluster)


def why_not(product: Product, shared: int) -> str | None:
    """Return why the kernel does not support `x @ w.T`, or None if it does.

    The activation is multiplied in its own dtype, of 8 or 16 bits. A program has
    `shared` bytes of shared memory.
    """
    format, dtype, blocks = product.format, product.x.dtype, product.blocks
    if format.history:
        return "it does not decode codes with a history"
    if is_in_two_parts(format.bits):
        return f"it does not decode codes of {format.bits} bits"
    if any(size > 1 for size in product.batch):
        return "it does not multiply stacks"
    if product.out_dtype.itemsize != 2:
        return "its results have 16 bits"
    plain = format.group == 64 or (format.group == 32 and format.bits == 4)
    if not plain and format.bits != 8:
        return f"it decodes groups of 64 codes, not of {format.group}"
    if format.block_size is not None and blocks > 1:
        if dtype != jnp.bfloat16 or product.scales.dtype != jnp.float32:
            return "blocks require bfloat16 activations and float32 scales"
        short = format.block_size == 32 and format.bits == 4
        served = format.block_size % STEP == 0 or short
        if not served or not (in_table(format) or format.bits == 8):
            return f"it does not support blocks of {format.block_size} of these codes"
        if blocks % 4:
            return "the scales of a row must be a multiple of 16 bytes"
    if product.packed % 16:
        return "rows of codes must be multiples of 16 bytes"
    if product.rows % STEP or product.size % (LINE // dtype.itemsize):
        # Since JAX 0.11, copies of swizzled tiles require whole lines.
        return f"rows of `x` and of the result must be multiples of {LINE} bytes"
    pipeline = pipeline_for(format, dtype, 1)
    if bytes_of(pipeline, format, blocks, dtype.itemsize) > shared:
        return "there is too little shared memory"
    return None


def bytes_of(pipeline: Pipeline, format: Format, blocks: int, itemsize: int) -> int:
    """Return the bytes of shared memory, for activations of `itemsize` bytes."""
    step = bytes_of_step(pipeline, format, blocks, itemsize)
    return pipeline.stages * step + pipeline.m * 128 + table_bytes(format) + 4096


def bytes_of_step(
    pipeline: Pipeline, format: Format, blocks: int, itemsize: int
) -> int:
    """Return the bytes that a program copies per step."""
    row_bytes = width_of(format, LINE // itemsize) + 16 * (blocks > 1)
    return pipeline.m * LINE + pipeline.rows * row_bytes


def width_of(format: Format, columns: int = STEP) -> int:
    """Return the bytes of codes per row that are copied at once: at least 16."""
    return max(columns * format.bits // 8, 16)
