"""The kernel for few rows, where reading the weight is all that should cost time.

Weights go to the matrix unit as int8: a mask and a shift for 32 bits of codes, or one
table lookup by hardware. Scales are applied to the result instead, one row of them for
each block, for which the activation is spread out: the rows of one block are zero in
the others. It is split in two int8 numbers, which keeps 15 bits of it.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int8, Shaped

from ..._int8 import round_int8, split_int8
from ...formats import Format
from ._chips import Chip
from ._tiles import lanes, pad_to, result_like, to_tiles


def _mask(byte: int) -> Array:
    """The same byte four times."""
    return jnp.uint32(byte * 0x01010101)


def _signed_top_bits(codes, plane: int, format: Format, tables, chip: Chip):
    """Codes with their sign in the top bit, moved to the top of the byte. The next bit
    says that it is not zero; 64 is then the unit."""
    shift = 8 - format.bits * (plane + 1)
    words = pltpu.bitcast(codes, jnp.uint32)
    words = words << shift if shift else words
    if format.bits == 1:
        words = (words & _mask(0x80)) | _mask(0x40)
    else:
        words = words & _mask(0xC0)
    return [pltpu.bitcast(words, jnp.int8)]


def _as_they_are(codes, plane: int, format: Format, tables, chip: Chip):
    return [codes]


def _looked_up(codes, plane: int, format: Format, tables, chip: Chip):
    words = pltpu.bitcast(codes, jnp.uint32)
    words = (words >> (plane * 4) if plane else words) & _mask(0x0F)
    indices = pltpu.bitcast(words, jnp.int8)
    rows, columns = indices.shape

    def lookup(table):
        def tile(i, j):
            return jnp.take_along_axis(
                table,
                indices[i : i + 32, j : j + lanes],
                axis=chip.gather_axis,
                mode="promise_in_bounds",
            )

        return jnp.concatenate(
            [
                jnp.concatenate([tile(i, j) for j in range(0, columns, lanes)], 1)
                for i in range(0, rows, 32)
            ],
            0,
        )

    return [lookup(table) for table in tables]


@dataclasses.dataclass(frozen=True)
class _Weights:
    """How a format becomes int8: by a function, and what one is then worth."""

    to_int8: Callable
    unit: float
    # Whether the bytes are floats as well: a sign and a power of two, or zero.
    float8: bool = False


_weights = {
    "int8": _Weights(_as_they_are, 1.0),
    "ternary": _Weights(_signed_top_bits, 1 / 64, float8=True),
    "binary": _Weights(_signed_top_bits, 1 / 64, float8=True),
    "nf4": _Weights(_looked_up, 1 / 127),
}


def _tables(
    format: Format, chip: Chip, exact: bool
) -> list[Int8[np.ndarray, "32 128"]]:
    """The codebook in int8, and what that leaves, in 254ths. One entry to a row or to a
    lane, whichever the hardware looks up."""
    if format.codebook is None:
        return []
    levels = np.zeros(32 if chip.gather_axis == 0 else lanes)
    levels[: len(format.codebook)] = np.array(format.codebook) * 127
    high = np.round(levels)
    low = np.round((levels - high) * 254)
    digits = np.stack([high, low] if exact else [high]).astype(np.int8)
    if chip.gather_axis == 0:
        return list(np.broadcast_to(digits[:, :, None], (len(digits), 32, lanes)))
    return list(np.broadcast_to(digits[:, None, :], (len(digits), 32, lanes)))


def _block_bytes(format: Format) -> int:
    return (format.block_size or format.group) * format.bits // 8


def _num_blocks(format: Format) -> int:
    """How many blocks 128 bytes of codes have, for each of which there are rows."""
    return lanes // _block_bytes(format) if format.block_size else 1


def fits(m: int, columns: int, format: Format) -> bool:
    """Whether there is such a kernel."""
    if format.name not in _weights or m > 32:
        return False
    if lanes % _block_bytes(format) or _num_blocks(format) > 8:
        return False
    spread = 2 * _num_blocks(format) * m * columns
    return spread <= 2**21 and columns * format.bits // 8 * lanes <= 2**21


def contract_columns(
    x: Float[Array, "batch m columns"],
    codes: Shaped[Array, "batch rows packed"],
    scales: Float[Array, "batch rows blocks"],
    *,
    format: Format,
    exact: bool,
    chip: Chip,
    interpret: bool,
) -> Float[Array, "batch m rows"]:
    """`x @ w.T`"""
    batch, m, _ = x.shape
    _, rows, packed = codes.shape
    blocks = scales.shape[-1]
    planes = 8 // format.bits
    group = _num_blocks(format)
    weights = _weights[format.name]
    tables = _tables(format, chip, exact)

    # Whole registers: sums of the rows of a block then need no shuffling.
    x = pad_to(x.astype(jnp.float32), 1, 8)
    padded = x.shape[1]
    digits, unit = _digits(x, exact)
    num_digits = digits.shape[1] // padded
    size = pl.cdiv(packed, lanes) * lanes
    chunk = lanes if format.block_size or size % chip.chunk else chip.chunk
    x = _spread(to_tiles(digits, chunk, format), group, format)
    most = min(chip.rows[format.name], 2**21 // size // lanes * lanes)
    bn = min(most, pl.cdiv(rows, lanes) * lanes)

    as_float8 = weights.float8 and not chip.int8 and chip.float8 is not None

    def multiply(x, w):
        out = jnp.int32
        if not chip.int8:  # Every int8 is a bfloat16.
            x, out = x.astype(jnp.bfloat16), jnp.float32
            w = pltpu.bitcast(w, chip.float8) if as_float8 else w.astype(x.dtype)
        return lax.dot_general(
            x, w, (((1,), (1,)), ((), ())), preferred_element_type=out
        )

    def combine(parts: list) -> Float[Array, "m rows"]:
        """Digits put together, the highest first."""
        total = parts[0].astype(jnp.float32)
        for part in parts[1:]:
            total = total * 254 + part.astype(jnp.float32)
        return total

    def rows_of(product, block: int):
        """Those of one block, the digits of the activation put together."""
        first = block * num_digits * padded
        return combine(
            [product[first + d * padded :][:padded] for d in range(num_digits)]
        )

    def kernel(x, codes, scales, *rest):
        *table_refs, out = rest
        looked_up = [table[...] for table in table_refs]
        total = jnp.zeros((padded, codes.shape[1]), jnp.float32)
        sums = []
        for start in range(0, size, chunk):
            part = codes[0, :, start : start + chunk]
            decoded = [
                weights.to_int8(part, plane, format, looked_up, chip)
                for plane in range(planes)
            ]
            span = slice(start * planes, (start + chunk) * planes)
            products = [
                multiply(
                    x[0, :, span],
                    jnp.concatenate(digit, 1) if planes > 1 else digit[0],
                )
                for digit in zip(*decoded, strict=True)
            ]
            if not format.block_size:
                sums = list(map(jnp.add, sums, products)) if sums else products
                continue
            first = start // _block_bytes(format)
            for block in range(min(group, blocks - first)):
                value = combine([rows_of(product, block) for product in products])
                scale = scales[0, first + block : first + block + 1, :]
                total = total + value * scale.astype(jnp.float32)
        if not format.block_size:
            total = combine([rows_of(s, 0) for s in sums])
            total = total * scales[0].astype(jnp.float32)
        out[0] = total

    table_spec = pl.BlockSpec((32, lanes), lambda b, j: (0, 0))
    out = pl.pallas_call(
        kernel,
        grid=(batch, pl.cdiv(rows, bn)),
        in_specs=[
            pl.BlockSpec((1, x.shape[1], size * planes), lambda b, j: (b, 0, 0)),
            pl.BlockSpec((1, bn, size), lambda b, j: (b, j, 0)),
            pl.BlockSpec((1, blocks, bn), lambda b, j: (b, 0, j)),
            *[table_spec for _ in tables],
        ],
        out_specs=pl.BlockSpec((1, padded, bn), lambda b, j: (b, 0, j)),
        out_shape=result_like(x[:, :padded], rows),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel")
        ),
        interpret=interpret,
        name=f"{format.name}_decode",
    )(x, codes, jnp.swapaxes(scales, 1, 2), *map(jnp.asarray, tables))
    worth = weights.unit / 254 ** max(len(tables) - 1, 0)
    if as_float8:
        worth = 1 / float(np.array([0x40], np.uint8).view(np.dtype(chip.float8))[0])
    return (out * unit * worth)[:, :m]


def _digits(
    x: Float[Array, "batch m columns"], exact: bool
) -> tuple[Int8[Array, "batch digits_m columns"], Float[Array, "batch m 1"]]:
    """The rows as int8, high digits above low ones, and what the lowest are worth."""
    batch, m, columns = x.shape
    flat = x.reshape(batch * m, columns)
    if not exact:
        digits, unit = round_int8(flat)
        return digits.reshape(x.shape), unit.reshape(batch, m, 1)
    digits, unit = split_int8(flat)
    digits = digits.reshape(2, batch, m, columns)
    digits = jnp.swapaxes(digits, 0, 1).reshape(batch, 2 * m, columns)
    return digits, unit[batch * m :].reshape(batch, m, 1)


def _spread(
    digits: Int8[Array, "batch digits_m columns"], group: int, format: Format
) -> Int8[Array, "batch rows columns"]:
    """Each row once for every block of a group, and zero in the others."""
    if group == 1:
        return digits
    batch, rows, columns = digits.shape
    x = digits.reshape(batch, rows, -1, group, _block_bytes(format))
    block = jnp.arange(group)
    mine = (block[:, None] == block)[:, None, None, :, None]
    x = jnp.where(mine, x[:, None], jnp.int8(0))
    return x.reshape(batch, group * rows, columns)
