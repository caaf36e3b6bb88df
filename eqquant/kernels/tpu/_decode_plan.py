"""Tiles, block specs and scratch memory of the decode kernel."""

import dataclasses
import functools as ft
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...formats import Format
from .._product import Product
from ._chips import Chip
from ._operands import choose_operands, Operands, padded_shape
from ._tiles import block_bytes, lanes, planes_of, tile_multiple
from ._two_parts import stored_bytes, used_bytes
from ._weights import Decoder, is_exact


def blocks_in_register(format: Format) -> int:
    """Return the number of blocks in 128 bytes of codes."""
    return lanes // block_bytes(format) if format.block_size else 1


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """The static choices for one product."""

    product: Product
    chip: Chip
    operands: Operands
    decode: Decoder

    @classmethod
    def make(
        cls,
        product: Product,
        chip: Chip,
        exact: bool,
        exact_table: bool,
        interpret: bool,
    ) -> "DecodePlan":
        format = product.format
        operands = choose_operands(product, chip, exact, exact_table)
        digits = operands.digits
        if interpret and digits.dtype == jnp.int4:  # XLA:CPU has no int4 matmul.
            digits = dataclasses.replace(digits, dtype=jnp.int8)
            operands = dataclasses.replace(operands, digits=digits)
        count = 2 if exact_table or operands.kind == "float8" else 1
        count = count if format.codebook and not is_exact(format) else 1
        decode = Decoder(format, chip, operands.kind, count, logic=chip.logic)
        return cls(product, chip, operands, decode)

    @property
    def format(self) -> Format:
        return self.product.format

    @property
    def blocked(self) -> bool:
        return bool(self.format.block_size)

    @property
    def m(self) -> int:
        """Rows of the padded activation."""
        return padded_shape(self.product)[0]

    @property
    def joined(self) -> int:
        """Rows of the weight that share a column of the transposed operand."""
        return max(self.operands.transposed, 1)

    @property
    def copies(self) -> int:
        """Copies of the activation in the spread activation."""
        pairs = self.operands.transposed == 2
        return 2 if pairs else blocks_in_register(self.format)

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
    def scales_by_row(self) -> bool:
        """Whether scales enter as `(rows, blocks)`, not transposed.

        XLA stores scales transposed, which wastes less memory, unless they fill whole
        registers. Transposing those outside of the kernel would take another pass.
        """
        return self.product.blocks % lanes == 0

    @ft.cached_property
    def size(self) -> int:
        """Bytes of a row of codes, padded to whole tiles."""
        multiple = tile_multiple(self.format)
        return (
            pl.cdiv(used_bytes(self.product.packed, self.format), multiple) * multiple
        )

    @ft.cached_property
    def tile_rows(self) -> int:
        """Rows of the weight in a tile."""
        chip, multiple = self.chip, lanes * self.joined
        most, _ = chip.steps_of(self.format)
        most = chip.options.tile_n or most
        most = min(most, min(2**22, chip.memory // 8) // self.size)
        rows = self.product.rows
        return min(pl.cdiv(most, multiple), pl.cdiv(rows, multiple)) * multiple

    @property
    def memory(self) -> int | None:
        """The bytes of vector memory of the kernel, or None for the default of 16 MB,
        half of which two tiles may fill."""
        large = self.tile_rows * self.size >= 2**22
        return min(2**25, self.chip.memory) if large else None

    @property
    def steps(self) -> int:
        """Tiles of the weight."""
        return pl.cdiv(self.product.rows, self.tile_rows)

    @property
    def cores(self) -> int:
        """Cores that share the tiles."""
        return min(self.chip.cores, self.steps)

    @ft.cached_property
    def chunk(self) -> int:
        """Bytes of a row that are decoded and multiplied at once."""
        _, chunk = self.chip.steps_of(self.format)
        return lanes if self.blocked else math.gcd(chunk, self.size)

    @property
    def span(self) -> int:
        """Columns of the spread activation per chunk."""
        return self.chunk * planes_of(self.format) * self.joined

    @ft.cached_property
    def chunks(self) -> int:
        """Chunks per iteration, whose codes and scales fill whole registers."""
        multiple = tile_multiple(self.format)
        chunks = multiple // math.gcd(multiple, self.chunk)
        if not self.blocked:
            return chunks
        # Scales of a row that fill the sublanes of a register.
        sublanes = 8 if self.scales_by_row else 32 // self.product.scales.dtype.itemsize
        return math.lcm(chunks, sublanes // math.gcd(sublanes, self.copies))

    @property
    def iterations(self) -> int:
        """Iterations of the loop over chunks. Remaining chunks follow it."""
        size = self.size
        if self.blocked:
            size = min(size, self.product.blocks * block_bytes(self.format))
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
        stored, blocks = stored_bytes(self.size, self.format), self.product.blocks
        by_row = lambda b, c, j: (b, self.tile(c, j), 0)
        by_column = lambda b, c, j: (b, 0, self.tile(c, j))
        scales = pl.BlockSpec((1, blocks, self.tile_rows), by_column)
        if self.scales_by_row:
            scales = pl.BlockSpec((1, self.tile_rows, blocks), by_row)
        whole = 1, *padded_shape(self.product)
        return [
            pl.BlockSpec(whole, lambda b, c, j: (b, 0, 0)),
            pl.BlockSpec((1, self.tile_rows, stored), by_row),
            scales,
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
        scales = pltpu.VMEM((self.product.blocks, self.tile_rows), jnp.float32)
        return [
            pltpu.VMEM(spread, self.operands.digits.dtype),
            by_row,
            *[pltpu.VMEM((32, lanes), jnp.int8)] * self.decode.num_tables,
            *[by_row] * bool(self.decode.offset),
            *[scales] * self.scales_by_row,
        ]
