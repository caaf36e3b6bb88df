"""From codes to numbers of 16 bits that tensor cores multiply.

Integers of 8 bits become the mantissa of a number whose exponent is known, of which
what is too much is subtracted. The bits of ternary and binary codes become the sign,
and the highest of the exponent. Other codes are looked up: see `_table.py`.

Each is inline PTX, one text for each plane: what planes share, NVIDIA's assembler
computes once. In interpret mode, which knows no PTX, the same is computed in JAX.
"""

import functools as ft

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped

from ...formats import Format
from . import _table
from ._levels import table_of
from ._ptx import block, on_pairs


def can_decode(format: Format) -> bool:
    """Whether there is a way from the codes to numbers of 16 bits."""
    return format.bits in (1, 2, 4) or (format.bits == 8 and format.integer_levels)


# What codes stand for whose highest bit is a sign, by their number of bits.
_signed_codes = {1: {0: 1, 1: -1}, 2: {0: 0, 1: 1, 3: -1}}


def is_signed(format: Format) -> bool:
    """Whether the bits of codes are a sign, and whether the level is not zero."""
    levels = _signed_codes.get(format.bits, {})
    used = [c for c in range(2**format.bits) if c not in format.unused_codes]
    return format.unit_levels and all(
        levels.get(code) == table_of(format)[code] for code in used
    )


def in_table(format: Format) -> bool:
    """Whether codes are looked up."""
    return format.bits < 8 and not is_signed(format)


def how(format: Format) -> str:
    """How codes become numbers, in words."""
    if format.bits == 8:
        return "codes converted"
    return "codes looked up in shared memory" if in_table(format) else "codes as signs"


class Decoder:
    """Codes to `parts` numbers of `dtype` whose sum, times `unit`, is the level."""

    def __init__(self, format: Format, dtype, parts: int, interpret: bool):
        self.bits, self.dtype = format.bits, jnp.dtype(dtype)
        self.interpret, self.unit = interpret, 1.0
        self.looks_up = in_table(format)
        self.tables: list[np.ndarray] = []
        if self.bits == 8:
            return
        levels = np.asarray(table_of(format), np.float32)
        if not self.looks_up:
            # The highest bit of the exponent alone is a 2.
            levels, self.unit = levels * 2, 0.5
        for _ in range(parts):
            self.tables.append(levels.astype(self.dtype))
            levels = levels - self.tables[-1].astype(np.float32)

    def prepare(self, threads: int) -> Int32[Array, ""] | int:
        """In a kernel of so many threads, before its loop: a zero, on which codes have
        to depend."""
        if self.interpret or not self.looks_up:
            return 0
        return _table.fill(self.tables, self.bits, threads)

    def __call__(
        self, codes: Shaped[Array, "rows bytes"], plane: int
    ) -> list[Shaped[Array, "rows bytes"]]:
        """One plane of a tile: its parts, the largest first."""
        if self.bits == 8 and self.interpret:
            return [codes.astype(self.dtype)]
        if self.interpret:
            index = codes >> jnp.uint8(plane * self.bits)
            index = index & jnp.uint8(2**self.bits - 1)
            return [_select(table, index) for table in self.tables]
        return [on_pairs(text, codes, self.dtype) for text in self.texts(plane)]

    def texts(self, plane: int) -> list[str]:
        """The PTX of each part."""
        if self.bits == 8:
            return [integers(self.dtype)]
        if not self.looks_up:
            return [signed(self.bits, plane)]
        parts = len(self.tables)
        return [_table.looked_up(self.bits, plane, i, parts) for i in range(parts)]


def _select(table: np.ndarray, index: Shaped[Array, "..."]):
    out = jnp.full(index.shape, table[0], table.dtype)
    for code, entry in enumerate(table):
        out = jnp.where(index == code, entry, out)
    return out


@ft.cache
def signed(bits: int, plane: int) -> str:
    """PTX that brings the bits of a plane of the codes to the top of numbers."""
    mask = "0x80008000, 0x40004000, 0xea" if bits == 1 else "0xc000c000, 0, 0xea"
    return block(
        "s",
        [
            "cvt.u32.u16 s, $1;",
            "prmt.b32 s, s, 0, 0x1404;",
            f"shl.b32 s, s, {8 - bits - plane * bits};",
            f"lop3.b32 $0, s, {mask};",
        ],
    )


@ft.cache
def integers(dtype) -> str:
    """PTX that converts integers of 8 bits."""
    if jnp.dtype(dtype) == jnp.float16:
        # 1024 + 128 + i, whose low byte is i + 128.
        return block(
            "s, c",
            [
                "mov.u32 c, 0xe480e480;",
                "cvt.u32.u16 s, $1;",
                "xor.b32 s, s, 0x8080;",
                "prmt.b32 s, s, 0x64, 0x4140;",
                "add.rn.f16x2 $0, s, c;",
            ],
        )
    # 128 + the low seven bits, less 128, or 256 if the sign is set.
    return block(
        "s, p, q, one",
        [
            "mov.u32 one, 0x3f803f80;",
            "cvt.u32.u16 s, $1;",
            "prmt.b32 s, s, 0, 0x4140;",
            "lop3.b32 p, s, 0x007f007f, 0x43004300, 0xea;",
            "lop3.b32 q, s, 0x00800080, 0xc300c300, 0xea;",
            "fma.rn.bf16x2 $0, p, one, q;",
        ],
    )
