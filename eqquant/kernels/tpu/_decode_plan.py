"""Tiles, block specs and scratch memory of the decode kernel."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Shaped

from ...formats import Format
from ._chips import Chip
from ._operands import choose_operands, Operands
from ._three_bits import stored_bytes, used_bytes
from ._tiles import lanes, planes_of, tile_multiple
from ._weights import Decoder, is_exact


def block_bytes(format: Format) -> int:
    return (format.block_size or format.group) // planes_of(format)


def blocks_in_register(format: Format) -> int:
    """Return the number of blocks in 128 bytes of codes."""
    return lanes // block_bytes(format) if format.block_size else 1


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """The static choices for one product.

    - `m`, `columns`: the shape of the padded activation.
    - `rows`, `blocks`: rows of the weight, and scales per row.
    - `scale_sublanes`: scales of a row that fill the sublanes of a register.
    - `scales_by_row`: whether scales enter as `(rows, blocks)`, not transposed.
    - `size`: bytes of a row of codes, padded to whole tiles.
    - `tile_rows`: rows of the weight in a tile.
    - `chunk`: bytes of a row that are decoded and multiplied at once.
    - `copies`: copies of the activation in the spread activation.
    - `steps`: tiles of the weight, which `cores` share.
    """

    format: Format
    decode: Decoder
    operands: Operands
    m: int
    columns: int
    rows: int
    blocks: int
    scale_sublanes: int
    scales_by_row: bool
    size: int
    tile_rows: int
    chunk: int
    copies: int
    steps: int
    cores: int

    @property
    def blocked(self) -> bool:
        return bool(self.format.block_size)

    @property
    def joined(self) -> int:
        """Rows of the weight that share a column of the transposed operand."""
        return max(self.operands.transposed, 1)

    @property
    def span(self) -> int:
        """Columns of the spread activation per chunk."""
        return self.chunk * planes_of(self.format) * self.joined

    @property
    def spread_rows(self) -> int:
        return self.copies * self.operands.digits.count * self.m

    @property
    def product_dtype(self) -> Any:
        return jnp.int32 if self.operands.digits.integers else jnp.float32

    @property
    def num_products(self) -> int:
        """Products per chunk: one for each digit of the weight."""
        return max(self.decode.num_tables, 1)

    @property
    def chunks(self) -> int:
        """Chunks per iteration, whose codes and scales fill whole registers."""
        multiple = tile_multiple(self.format)
        chunks = multiple // math.gcd(multiple, self.chunk)
        if not self.blocked:
            return chunks
        sublanes = self.scale_sublanes
        return math.lcm(chunks, sublanes // math.gcd(sublanes, self.copies))

    @property
    def iterations(self) -> int:
        """Iterations of the loop over chunks. Chunks that are left follow it."""
        size = self.size
        if self.blocked:
            size = min(size, self.blocks * block_bytes(self.format))
        return size // (self.chunks * self.chunk)

    @property
    def bundles(self) -> int:
        """An estimate of the instruction bundles of an iteration."""
        weights = self.tile_rows * self.chunks * self.chunk * planes_of(self.format)
        return 6 * self.num_products * weights // 4096

    def tile(self, core, step):
        """Return the tile for a step. Cores without a last tile repeat the last one."""
        per_core = pl.cdiv(self.steps, self.cores)
        return jnp.minimum(core * per_core + step, self.steps - 1)

    @property
    def in_specs(self) -> list[pl.BlockSpec]:
        stored = stored_bytes(self.size, self.format)
        by_row = lambda b, c, j: (b, self.tile(c, j), 0)
        by_column = lambda b, c, j: (b, 0, self.tile(c, j))
        return [
            pl.BlockSpec((1, self.m, self.columns), lambda b, c, j: (b, 0, 0)),
            pl.BlockSpec((1, self.tile_rows, stored), by_row),
            pl.BlockSpec((1, self.tile_rows, self.blocks), by_row)
            if self.scales_by_row
            else pl.BlockSpec((1, self.blocks, self.tile_rows), by_column),
        ]

    @property
    def out_specs(self) -> pl.BlockSpec:
        by_column = lambda b, c, j: (b, 0, self.tile(c, j))
        return pl.BlockSpec((1, self.m, self.tile_rows), by_column)

    @property
    def scratch_shapes(self) -> list:
        """The spread activation, its scales, the tables, the sums of its rows if codes
        have an offset, and the transposed scales."""
        spread = self.spread_rows, self.size * planes_of(self.format) * self.joined
        by_row = pltpu.VMEM((self.m, lanes), jnp.float32)
        return [
            pltpu.VMEM(spread, self.operands.digits.dtype),
            by_row,
            *[pltpu.VMEM((32, lanes), jnp.int8)] * self.decode.num_tables,
            *[by_row] * bool(self.decode.offset),
            *[pltpu.VMEM((self.blocks, self.tile_rows), jnp.float32)]
            * self.scales_by_row,
        ]


def make_plan(
    x: Shaped[Array, "batch m columns"],
    codes: Shaped[Array, "batch rows packed"],
    scales: Float[Array, "batch rows blocks"],
    m: int,
    *,
    format: Format,
    exact: bool,
    exact_table: bool,
    chip: Chip,
    interpret: bool,
) -> DecodePlan:
    """Return the plan for a padded activation with `m` rows before padding."""
    _, rows, packed = codes.shape
    blocks = scales.shape[-1]
    operands = choose_operands(
        m,
        x.shape[2],
        x.dtype,
        format,
        exact=exact,
        exact_table=exact_table,
        chip=chip,
    )
    digits = operands.digits
    if interpret and digits.dtype == jnp.int4:  # XLA:CPU has no int4 matmul.
        digits = dataclasses.replace(digits, dtype=jnp.int8)
        operands = dataclasses.replace(operands, digits=digits)
    count = 2 if exact_table or operands.kind == "float8" else 1
    decode = Decoder(
        format,
        chip,
        operands.kind,
        count if format.codebook and not is_exact(format) else 1,
        logic=chip.logic,
    )
    size = pl.cdiv(used_bytes(packed, format), tile_multiple(format))
    size *= tile_multiple(format)
    most_rows, chunk = chip.steps_of(format)
    most_rows = chip.options.tile_n or most_rows
    most_rows = min(most_rows, min(2**22, chip.memory // 8) // size)
    multiple = lanes * max(operands.transposed, 1)
    tile_rows = min(pl.cdiv(most_rows, multiple), pl.cdiv(rows, multiple)) * multiple
    steps = pl.cdiv(rows, tile_rows)
    # XLA stores scales transposed, which wastes less memory, unless they fill whole
    # registers. Transposing those outside of the kernel would take another pass.
    scales_by_row = blocks % lanes == 0
    return DecodePlan(
        format,
        decode,
        operands,
        m=x.shape[1],
        columns=x.shape[2],
        rows=rows,
        blocks=blocks,
        scale_sublanes=8 if scales_by_row else 32 // scales.dtype.itemsize,
        scales_by_row=scales_by_row,
        size=size,
        tile_rows=tile_rows,
        chunk=lanes if format.block_size else math.gcd(chunk, size),
        copies=2 if operands.transposed == 2 else blocks_in_register(format),
        steps=steps,
        cores=min(chip.cores, steps),
    )
