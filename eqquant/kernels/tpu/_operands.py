"""What the kernel for few rows multiplies: what codes become, in which digits the
activation is, and whether codes are transposed before.

The activation is int8 where the weight is, in two digits, which keep 15 bits of it, or
in one; int4 where the weight is, in four, which keep as many; and bfloat16 where the
weight is a float: one digit if it is in bfloat16 itself.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from ...formats import Format
from ._chips import Chip, Kind
from ._tiles import planes_of, tile_multiple
from ._weights import can_become, is_exact, is_shifted


@dataclasses.dataclass(frozen=True)
class Digits:
    """How the activation becomes what the matrix unit takes: in so many digits, each
    `base` times what the next is worth. Those that are integers are from `-top - 1` to
    `top`."""

    count: int
    base: int
    dtype: Any
    top: int = 0

    @property
    def integers(self) -> bool:
        return self.top > 0

    @property
    def largest(self) -> int:
        """With `top` for all digits."""
        return self.top * sum(self.base**i for i in range(self.count))


def digits_of(x_dtype, kind: Kind, exact: bool, chip: Chip) -> Digits:
    if kind == "bits of int4":
        return Digits(4, 16, jnp.int4, 7)
    if kind == "int8" and chip.int8:
        one = not exact or x_dtype == jnp.int8
        return Digits(1, 1, jnp.int8, 127) if one else Digits(2, 256, jnp.int8, 127)
    one = not exact or x_dtype in (jnp.bfloat16, jnp.int8)
    return Digits(1 if one else 2, 1, jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Operands:
    """Codes are transposed first if `turned` is 1, and pairs of rows of them as one if
    it is 2 (see `turn` in `_spread.py`): the matrix unit takes a weight faster that
    need not be transposed on its way into it, where there are few codes to transpose,
    or hardware for it."""

    kind: Kind
    digits: Digits
    turned: int

    @property
    def weights(self) -> str:
        """As what they are multiplied, in words."""
        is_cast = self.kind == "int8" and not self.digits.integers
        return "bfloat16" if is_cast else self.kind

    def bits_kept(self, x_dtype) -> int | None:
        """Of an activation; None for all."""
        if self.digits.integers:
            return 8 if self.digits.count == 1 else 15
        if x_dtype == jnp.bfloat16:
            return None
        return 16 if self.digits.count == 2 else 8


def kind_of(format: Format, x_dtype, exact_table: bool, chip: Chip) -> Kind:
    """What the weight becomes, for an activation of some dtype."""
    floats = can_become("float8", format, chip)
    if is_exact(format) or is_shifted(format):
        # One digit of either will do. Floats leave an activation in bfloat16 as it is,
        # in one digit, too: that is worth a lookup where these are fast.
        fast = chip.gather_axis == 0 and x_dtype == jnp.bfloat16
        floats = floats and (fast or not chip.int8)
    elif format.codebook is not None:
        # In two floats of 8 bits it keeps 13 bits, which an activation in bfloat16 has
        # not; in one int8 it is faster.
        floats = floats and (x_dtype == jnp.bfloat16 if exact_table else not chip.int8)
    return "float8" if floats else "int8"


def choose_operands(
    m: int,
    columns: int,
    x_dtype,
    format: Format,
    *,
    exact: bool,
    exact_table: bool,
    chip: Chip,
) -> Operands:
    """For an activation of `m` rows, which keeps 15 bits of each entry (`exact`), or 7;
    the table of a format likewise."""

    m = math.ceil(m / 8) * 8
    multiple = tile_multiple(format) * planes_of(format)
    columns = math.ceil(columns / multiple) * multiple

    def operands(kind: Kind) -> Operands:
        digits = digits_of(x_dtype, kind, exact, chip)
        turned = chip.turned_of(format)
        spread = 2 * turned**2 * digits.count * m * columns
        in_pairs_of_blocks = turned == 2 and format.block_size
        if in_pairs_of_blocks or spread > 2**22:
            turned = 0
        return Operands(kind, digits, turned)

    bits = chip.bits_of(format)
    if bits is not None and can_become(bits, format, chip):
        found = operands(bits)
        # Halves of bytes follow each other only where codes are transposed. More rows
        # are as fast in floats, and so is what has one digit there.
        takes_int4 = found.turned and m <= 24 and x_dtype != jnp.int8
        if bits == "bits of float8" or takes_int4:
            return found
    return operands(kind_of(format, x_dtype, exact_table, chip))
