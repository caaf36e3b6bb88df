"""The tile sizes of the general kernel."""

import dataclasses
import math

import jax.numpy as jnp

from ...formats import Format
from .._product import Product
from ._chips import Chip
from ._tiles import bits_of, lanes, planes_of, tile_multiple
from ._two_parts import used_bytes


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Tile sizes: `m` rows of the activation and of the result, `rows` rows of the
    weight, and `bytes` bytes per row."""

    m: int
    rows: int
    bytes: int


def choose_tiles(product: Product, operand, chip: Chip) -> TileSizes:
    """Choose tiles as long along the contracted axis as vector memory allows."""
    requested, format = chip.options, product.format
    packed = used_bytes(product.packed, format)
    size = max(jnp.dtype(operand).itemsize, 2)
    register = 32 // jnp.dtype(operand).itemsize
    max_m = (requested.tile_m or chip.tile_m) * 2 // size
    bm = min(math.ceil(product.m / register) * register, max_m)
    bm = math.ceil(bm / register) * register
    tile_n = requested.tile_n or chip.tile_n
    budget = budget_of(chip)
    tiles = None
    # If a tile has all columns, the kernel can permute the activation.
    whole = chip.cores == 1 and packed * planes_of(format) <= 4096
    whole = whole and not product.contract_rows
    choices = 4096, 2048, 1024, 512
    if requested.tile_k:
        choices = (requested.tile_k,)
    elif bm >= 1024 and not whole:
        # On v5p, longer tiles are 0.5 % faster and take 1.7 times as long to compile.
        choices = 1024, 512
    for tile_k in choices:
        rows, columns = tile_n, tile_k
        if product.contract_rows:
            rows, columns = tile_k, tile_n
        bn = math.ceil(min(product.rows, rows) / lanes) * lanes
        tile = _tile_bytes(packed, format, columns)
        bk = tile * planes_of(format)
        free = bk if product.contract_rows else bn
        in_and_out = 2 * bm * (bn + bk) * size + 4 * bm * free
        tiles = TileSizes(bm, bn, tile)
        if in_and_out + bn * bk * (size + 1) <= budget:
            break
    assert tiles is not None
    return tiles


def budget_of(chip: Chip) -> int:
    """Return the bytes of vector memory for tiles. Temporaries take the rest."""
    return chip.memory * 2 // 3


def fits(product: Product) -> bool:
    """Return whether a tile of whole blocks fits in vector memory."""
    packed = used_bytes(product.packed, product.format)
    return _tile_bytes(packed, product.format, 8) * 512 <= 2**21


def _tile_bytes(packed: int, format: Format, columns: int) -> int:
    """Return the bytes per row of a tile of about `columns` columns: all bytes of the
    row, or whole registers and whole blocks."""
    chunk = tile_multiple(format)
    # Scales fill whole registers as well: 8 rows of 32 bits, or 16 rows of 16 bits.
    block = (format.block_size or format.group) * bits_of(format) // 8
    whole = math.lcm(chunk, block * (16 if format.block_size else 1))
    size = math.ceil(columns * bits_of(format) // 8 / whole) * whole
    return min(math.ceil(packed / chunk) * chunk, size)
