"""How the kernel of Mosaic cuts a product, which products it serves, and what shared
memory it takes."""

import dataclasses

import jax.numpy as jnp

from ...formats import Format
from ._lookup import in_table
from ._table import size_of


LINE = 128  # Bytes of a row of the activation, in a step.
STEP = LINE // 2  # Columns of the weight; of integers twice as many.


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How a product is cut.

    - `m`: rows of the activation, of a program.
    - `rows`: of the weight.
    - `stages`: steps that are on their way, or multiplied.
    - `cluster`: programs that share rows of the activation.
    - `cores`: at most so many programs.
    """

    m: int = 256
    rows: int = 128
    stages: int = 4
    cluster: int = 2
    cores: int = 132


def pipeline_for(x, cores: int) -> Pipeline:
    """Of an activation in int8, a step has twice the codes."""
    return Pipeline(cores=cores, stages=3 if x.dtype == jnp.int8 else 4)


def why_not(x, codes, scales, format: Format, out_dtype, shared: int) -> str | None:
    """Why `x @ w.T`, with the activation as it is, in 8 or 16 bits, is not for this
    kernel, if it is not. Programs have so many bytes of `shared` memory."""
    dtype = jnp.dtype(x.dtype)
    *batch, rows, packed = codes.shape
    blocks = scales.shape[-1]
    if any(size > 1 for size in batch):
        return "of stacks it multiplies none"
    if out_dtype is not None and jnp.dtype(out_dtype).itemsize != 2:
        return "its results are in 16 bits"
    plain = format.group == 64 or (format.group == 32 and format.bits == 4)
    if not plain and format.bits != 8:
        return f"it decodes groups of 64 codes, and not of {format.group}"
    if format.block_size is not None and blocks > 1:
        if dtype != jnp.bfloat16 or scales.dtype != jnp.float32:
            return "it scales blocks by float32, for bfloat16"
        short = format.block_size == 32 and format.bits == 4
        served = format.block_size % STEP == 0 or short
        if not served or not (in_table(format) or format.bits == 8):
            return f"it does not scale blocks of {format.block_size} such codes"
        if blocks % 4:
            return "a row's scales are to be a multiple of 16 bytes"
    if packed % 16 or rows % 8:
        return "rows of codes and of the result are to be multiples of 16 bytes"
    pipeline = pipeline_for(x, 1)
    if bytes_of(pipeline, format, blocks, dtype.itemsize) > shared:
        return "there is too little shared memory"
    return None


def bytes_of(pipeline: Pipeline, format: Format, blocks: int, itemsize: int) -> int:
    """Of shared memory, for an activation of so many bytes each."""
    step = bytes_of_step(pipeline, format, blocks, itemsize)
    table = size_of(format.bits) if in_table(format) else 0
    return pipeline.stages * step + pipeline.m * 128 + table + 4096


def bytes_of_step(
    pipeline: Pipeline, format: Format, blocks: int, itemsize: int
) -> int:
    """Which a program brings."""
    of_row = width_of(format, LINE // itemsize) + 16 * (blocks > 1)
    return pipeline.m * LINE + pipeline.rows * of_row


def width_of(format: Format, columns: int = STEP) -> int:
    """Bytes of a row of codes that are brought at once: at least 16."""
    return max(columns * format.bits // 8, 16)
