"""The operands of the decode kernel: how codes and the activation enter the matrix
unit, and whether codes are transposed first.

If the weight is int8, the activation is int8 too: two digits keep 15 bits per entry,
one keeps 7. If the weight is int4, the activation is four int4 digits, which keep 15
bits. If the weight is a float, the activation is one or two bfloat16 numbers. One is
enough for an activation in bfloat16.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from ...formats import Format
from .._product import Product
from ._chips import Chip, Kind
from ._tiles import planes_of, tile_multiple
from ._weights import can_become, is_exact, is_shifted


@dataclasses.dataclass(frozen=True)
class Digits:
    """How an entry of the activation is split into `count` digits.

    Each digit is worth `base` times the next. Integer digits are between `-top - 1` and
    `top`; `top` is zero for floats.
    """

    count: int
    base: int
    dtype: Any
    top: int = 0

    @property
    def integers(self) -> bool:
        return self.top > 0

    @property
    def largest(self) -> int:
        """The integer whose digits are all `top`."""
        return self.top * sum(self.base**i for i in range(self.count))


def digits_of(x_dtype, kind: Kind, exact: bool, chip: Chip) -> Digits:
    """Return the digits of an activation for a weight of some kind."""
    if kind == "bits of int4":
        return Digits(4, 16, jnp.int4, 7)
    if kind == "int8" and chip.int8:
        if not exact or x_dtype == jnp.int8:
            return Digits(1, 1, jnp.int8, 127)
        return Digits(2, 256, jnp.int8, 127)
    single = not exact or x_dtype in (jnp.bfloat16, jnp.int8)
    return Digits(1 if single else 2, 1, jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Operands:
    """The dtypes of both operands, and whether codes are transposed first.

    `transposed` is 0 if they are not, 1 if they are, and 2 if pairs of rows are
    transposed as 16-bit elements by `transpose_codes`. The matrix unit loads a
    weight faster if it need not transpose it. Transposing codes pays if they are small,
    or if the chip has hardware for it.
    """

    kind: Kind
    digits: Digits
    transposed: int

    @property
    def weights(self) -> str:
        """The dtype in which weights are multiplied."""
        is_cast = self.kind == "int8" and not self.digits.integers
        return "bfloat16" if is_cast else self.kind

    def bits_kept(self, x_dtype) -> int | None:
        """Return the bits that an entry of the activation keeps, or None for all."""
        if self.digits.integers:
            return 8 if self.digits.count == 1 else 15
        if x_dtype == jnp.bfloat16:
            return None
        return 16 if self.digits.count == 2 else 8


def kind_of(format: Format, x_dtype, exact_table: bool, chip: Chip) -> Kind:
    """Return the kind of numbers that codes become for an activation dtype."""
    floats = can_become("float8", format, chip)
    if is_exact(format) or is_shifted(format):
        # Both kinds are exact in one digit. Floats also leave a bfloat16 activation in
        # one digit, which is worth a lookup if lookups are fast.
        fast = chip.gather_axis == 0 and x_dtype == jnp.bfloat16
        floats = floats and (fast or not chip.int8)
    elif format.codebook is not None:
        # Two float8 digits keep 13 bits of an entry, more than a bfloat16 activation
        # has. A single int8 digit is faster.
        floats = floats and (x_dtype == jnp.bfloat16 if exact_table else not chip.int8)
    return "float8" if floats else "int8"


def padded_shape(product: Product) -> tuple[int, int]:
    """Return the shape of the activation, padded to whole tiles, and whole sublanes of
    rows. The rows of a copy can then be added without shuffles."""
    multiple = tile_multiple(product.format) * planes_of(product.format)
    columns = math.ceil(product.size / multiple) * multiple
    return math.ceil(product.m / 8) * 8, columns


def choose_operands(
    product: Product, chip: Chip, exact: bool, exact_table: bool
) -> Operands:
    """Choose the operands of a product.

    The activation keeps 15 bits per entry if `exact`, otherwise 7. The entries of a
    codebook keep 15 bits if `exact_table`, otherwise 7.
    """
    format, x_dtype = product.format, product.x.dtype
    m, columns = padded_shape(product)

    def operands(kind: Kind) -> Operands:
        digits = digits_of(x_dtype, kind, exact, chip)
        transposed = chip.transposed_of(format)
        spread = 2 * transposed**2 * digits.count * m * columns
        pairs_with_blocks = transposed == 2 and format.block_size
        if pairs_with_blocks or spread > 2**22:
            transposed = 0
        return Operands(kind, digits, transposed)

    bits = chip.bits_of(format)
    if bits is not None and can_become(bits, format, chip):
        found = operands(bits)
        # The halves of bytes become adjacent rows only if codes are transposed. For
        # more than 24 rows, or a single digit, floats are as fast.
        takes_int4 = found.transposed and m <= 24 and x_dtype != jnp.int8
        if bits == "bits of float8" or takes_int4:
            return found
    return operands(kind_of(format, x_dtype, exact_table, chip))
