"""Tiles, shapes and index maps of the Triton kernel."""

import dataclasses
import functools as ft
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from ...formats import Format, is_in_two_parts, num_bytes, parts_of, planes_of
from .._product import Product
from ._lookup import Decoder
from ._two_parts import high_bytes, rotations
from ._windows import odd_bits, planes_of_word, WindowDecoder, WORD


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes of the Triton kernel.

    - `m`: rows of the activation in a tile.
    - `rows`: rows of the weight in a subtile.
    - `bytes`: bytes of a row in a subtile: a part of a block or, for `x @ w.T`, one or
        several whole blocks. The high part of codes in two parts does not count. Codes
        with a history are read in words of four bytes, which count as bytes here.
    - `subtiles`: subtiles of a step, along a row.
    - `split`: programs that share a sum (split-K).
    - `warps`: warps of a program.
    - `stages`: pipeline stages.
    - `scaled`: whether scales multiply the weight, in 16 bits, rather than the product
        with a block.
    """

    m: int
    rows: int
    bytes: int
    subtiles: int
    split: int = 1
    warps: int = 4
    stages: int = 3
    scaled: bool = False

    @property
    def step_bytes(self) -> int:
        """Bytes of a row in a step."""
        return self.bytes * self.subtiles


def subtile_bytes(format: Format, most: int) -> int:
    """Return the bytes of a row that share a scale and a slice of a plane: a power of
    two, at most `most`. Tensor cores need at least 16."""
    if format.block_size is None:
        return most
    return math.gcd(format.block_size // planes_in(format), most)


def unit_bytes(format: Format) -> int:
    """Return the size of what a row of codes is read in: bytes or words."""
    return WORD if format.history else 1


def planes_in(format: Format) -> int:
    """Return the number of codes in a byte, or in a word of codes with a history."""
    return planes_of_word(format) if format.history else planes_of(format.bits)


@dataclasses.dataclass(frozen=True)
class TritonPlan:
    """The static choices for one product.

    - `operand`: the dtype of both operands of the tensor cores.
    - `parts`: the number of operands whose sum is the activation, or the weight.
    """

    product: Product
    tiles: Tiles
    operand: Any
    parts: tuple[int, int]
    interpret: bool

    @ft.cached_property
    def decoder(self) -> Decoder | WindowDecoder | None:
        """The decoder of the weight, or None if operands are integers."""
        if self.operand == jnp.int8:
            return None
        format, pairs = self.product.format, 1
        if format.history:
            return WindowDecoder(format, self.operand, self.interpret)
        if self.tiles.m > 64 and not self.product.contract_rows:
            pairs = 2
        return Decoder(format, self.operand, self.parts[1], self.interpret, pairs)

    @property
    def batch(self) -> int:
        return math.prod(self.product.batch)

    @property
    def blocked(self) -> bool:
        return self.product.blocks > 1

    @property
    def planes(self) -> int:
        return planes_in(self.product.format)

    @property
    def sum_dtype(self) -> Any:
        return jnp.int32 if self.decoder is None else jnp.float32

    @property
    def scale(self) -> float:
        """The factor from sums of decoded numbers to sums of levels."""
        return 1.0 if self.decoder is None else self.decoder.scale

    @property
    def row_bytes(self) -> int:
        """Bytes of a row. The high part of codes in two parts does not count."""
        return row_bytes(self.product)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, if there are several."""
        return self.row_bytes // self.product.blocks

    @property
    def subtile_blocks(self) -> int:
        """Blocks in a subtile, or 1 if a subtile is part of a block."""
        return max(self.tiles.bytes // self.block_bytes, 1) if self.blocked else 1

    @property
    def tile_size(self) -> int:
        """Rows of the weight, or bytes of its rows, in a tile of the result."""
        contract_rows = self.product.contract_rows
        return self.tiles.step_bytes if contract_rows else self.tiles.rows

    @property
    def _contracted(self) -> tuple[int, int]:
        """The size of the contracted axis of the codes, and of a step along it."""
        if self.product.contract_rows:
            return self.product.rows, self.tiles.rows
        return self.row_bytes, self.tiles.step_bytes

    @property
    def steps(self) -> int:
        """Steps of each program."""
        size, step = self._contracted
        return pl.cdiv(pl.cdiv(size, step), self.tiles.split)

    @property
    def whole(self) -> bool:
        """True if all steps are in bounds."""
        size, step = self._contracted
        return self.steps * step * self.tiles.split == size

    @property
    def num_m(self) -> int:
        """Tiles along the rows of the activation."""
        return pl.cdiv(self.product.m, self.tiles.m)

    @property
    def grid(self) -> tuple[int, int, int]:
        product = self.product
        size = self.row_bytes if product.contract_rows else product.rows
        tiles = self.num_m * pl.cdiv(size, self.tile_size)
        return tiles, self.tiles.split, self.batch

    def x_columns_of(self, start, plane: int) -> tuple[Int[Array, " bytes"], Any]:
        """Return the columns of the activation of `x @ w.T` for a plane of a subtile,
        and which of them exist."""
        if self.product.format.history:
            # In plane order, so that adjacent columns are loaded.
            byte = start + iota(self.tiles.bytes)
            return plane * self.row_bytes + byte, byte < self.row_bytes
        column = self.columns_of(start, plane)
        return column, column < self.product.columns

    @property
    def positions(self) -> list[np.ndarray]:
        """Arrays by position in a group, or in a subtile, that the decoder takes after
        the codes."""
        format = self.product.format
        if format.history:
            return odd_bits(format, self.tiles.bytes)
        if is_in_two_parts(format.bits):
            return [rotations(format, self.tiles.bytes)]
        return []

    def columns_of(self, start, plane: int) -> Int[Array, " bytes"]:
        """Return the columns of the weight that a plane of a subtile has. The subtile
        starts at byte `start`."""
        if self.product.format.history:
            return (start + iota(self.tiles.bytes)) * self.planes + plane
        stride = self.product.format.group
        run = stride // self.planes
        if self.planes == 1:
            run = stride = self.tiles.bytes
        group, within = self._in_groups(start, run)
        return group * stride + plane * run + within

    def codes_of(self, start) -> list[tuple[Int[Array, " bytes"], Any]]:
        """Return the positions of the bytes of a subtile in a row of codes, for each
        part of the codes, and which of them are codes, or None for all."""
        format = self.product.format
        if format.history:
            return self._words_of(start)
        if not is_in_two_parts(format.bits):
            return [(start + iota(self.tiles.bytes), None)]
        run, high = format.group // self.planes, high_bytes(format)
        group, within = self._in_groups(start, run)
        first = group * num_bytes(format.group, format.bits)
        # This equals the remainder of `within`, but Triton finds adjacent bytes.
        in_high = lax.rem(start + iota(self.tiles.bytes), jnp.int32(high))
        return [(first + within, None), (first + run + in_high, None)]

    def _words_of(self, start) -> list[tuple[Int[Array, " words"], Any]]:
        """Return the words of a subtile and the words before them, for each part."""
        format = self.product.format
        run = format.group // self.planes
        block, within = self._in_groups(start, run)
        first, is_code = block * run, within > 0
        if not is_in_two_parts(format.bits):
            return [(first + within, None), (first + within - 1, is_code)]
        low_bits, high_bits = parts_of(format.bits)
        high = jnp.int32(run * high_bits // low_bits)
        first = block * (run + high)
        in_high = lax.rem(within, high), lax.rem(within + (high - 1), high)
        return [
            (first + within, None),
            (first + within - 1, is_code),
            (first + run + in_high[0], None),
            (first + run + in_high[1], is_code),
        ]

    def positions_at(self, start) -> Int[Array, " bytes"]:
        """Return the positions of a subtile in [`positions`][]."""
        run = self.product.format.group // self.planes
        i = iota(self.tiles.bytes)
        return lax.rem(start, jnp.int32(run)) + i if run > self.tiles.bytes else i

    def _in_groups(self, start, run: int) -> tuple[Any, Int[Array, " bytes"]]:
        """Return the group of each byte of a subtile, and the position in its group.
        Groups have `run` bytes."""
        i, size = iota(self.tiles.bytes), jnp.int32(run)
        group = lax.div(start, size)
        if run > self.tiles.bytes:
            return group, lax.rem(start, size) + i
        if run == self.tiles.bytes:
            return group, i
        return group + lax.div(i, size), lax.rem(i, size)


def row_bytes(product: Product) -> int:
    """Return the bytes of a row of the weight, or its words, without the high part of
    codes in two parts."""
    return product.columns // planes_in(product.format)


def iota(size: int) -> Int[Array, " size"]:
    return lax.broadcasted_iota(jnp.int32, (size,), 0)
