"""Decode codes to the 16-bit numbers that tensor cores multiply.

int8 codes become the mantissa of a number with a fixed exponent, and the bias is then
subtracted. The bits of ternary and binary codes become the sign and the highest
exponent bit. Other codes are looked up in the table of `_table.py`.

Each method is inline PTX, with one text per plane. NVIDIA's assembler merges the
common subexpressions of planes. Interpret mode computes the same numbers in JAX.
"""

import functools as ft

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped

from ...formats import Format
from . import _table
from ._levels import table_of
from ._ptx import decoding, on_bytes


def can_decode(format: Format) -> bool:
    """Return whether codes of a format can be decoded to 16-bit numbers."""
    return format.bits in (1, 2, 4) or (format.bits == 8 and format.integer_levels)


# Levels of codes whose highest bit is a sign, by the number of bits.
_signed_codes = {1: {0: 1, 1: -1}, 2: {0: 0, 1: 1, 3: -1}}


def is_signed(format: Format) -> bool:
    """Return whether a code is a sign bit and a bit for a nonzero level."""
    levels = _signed_codes.get(format.bits, {})
    used = [c for c in range(2**format.bits) if c not in format.unused_codes]
    return format.unit_levels and all(
        levels.get(code) == table_of(format)[code] for code in used
    )


def in_table(format: Format) -> bool:
    """Return whether codes are looked up in a table."""
    return format.bits < 8 and not is_signed(format)


def decoding_of(format: Format) -> str:
    """Describe how codes are decoded."""
    if format.bits == 8:
        return "codes converted"
    return "codes looked up in shared memory" if in_table(format) else "codes as signs"


class Decoder:
    """Decode codes to `parts` numbers of `dtype` whose sum, times `scale`, is the
    level. The PTX decodes `pairs` pairs of codes at once."""

    def __init__(
        self, format: Format, dtype, parts: int, interpret: bool, pairs: int = 1
    ):
        self.bits, self.dtype, self.pairs = format.bits, jnp.dtype(dtype), pairs
        self.interpret, self.scale = interpret, 1.0
        self.looks_up = in_table(format)
        self.tables: list[np.ndarray] = []
        if self.bits == 8:
            return
        levels = np.asarray(table_of(format), np.float32)
        if not self.looks_up:
            # A number with only the highest exponent bit set is 2.
            levels, self.scale = levels * 2, 0.5
        for _ in range(parts):
            self.tables.append(levels.astype(self.dtype))
            levels = levels - self.tables[-1].astype(np.float32)

    def prepare(self, threads: int) -> Int32[Array, ""] | int:
        """Fill the table, in a kernel of `threads` threads before its loop. Return a
        zero on which the loads of codes must depend."""
        if self.interpret or not self.looks_up:
            return 0
        return _table.fill(self.tables, self.bits, threads)

    def __call__(
        self,
        codes: Shaped[Array, "rows bytes"],
        plane: int,
        scale: Shaped[Array, "rows bytes"] | None = None,
    ) -> list[Shaped[Array, "rows bytes"]]:
        """Return the parts of a plane of a tile, the largest first. A plane with a
        `scale`, of the dtype `dtype`, has one part, which the scale multiplies."""
        assert scale is None or len(self.tables) < 2
        if self.interpret:
            out = self._interpreted(codes, plane)
            return out if scale is None else [out[0] * scale]
        args = [codes] if scale is None else [codes, scale]
        texts = self.texts(plane, scale is not None)
        return [on_bytes(text, args, self.dtype, self.pairs) for text in texts]

    def _interpreted(self, codes, plane: int) -> list:
        if self.bits == 8:
            return [codes.astype(self.dtype)]
        index = codes >> jnp.uint8(plane * self.bits)
        index = index & jnp.uint8(2**self.bits - 1)
        return [_select(table, index) for table in self.tables]

    def texts(self, plane: int, scaled: bool = False) -> list[str]:
        """Return the PTX of each part."""
        parts = max(len(self.tables), 1)
        return [self._text(plane, i, scaled) for i in range(parts)]

    def _text(self, plane: int, part: int, scaled: bool) -> str:
        if self.bits == 8:
            return integers(self.dtype, self.pairs, scaled)
        if not self.looks_up:
            return signed(self.bits, plane, self.pairs, scaled)
        parts = len(self.tables)
        return _table.looked_up(self.bits, plane, part, parts, self.pairs, scaled)


def _select(table: np.ndarray, index: Shaped[Array, "..."]):
    out = jnp.full(index.shape, table[0], table.dtype)
    for code, entry in enumerate(table):
        out = jnp.where(index == code, entry, out)
    return out


@ft.cache
def signed(bits: int, plane: int, pairs: int = 1, scaled: bool = False) -> str:
    """Return PTX that moves the bits of a plane to the top of 16-bit numbers."""
    mask = "0x80008000, 0x40004000, 0xea" if bits == 1 else "0xc000c000, 0, 0xea"
    lines = []
    for i, selector in enumerate(["0x1404", "0x3424"][:pairs]):
        lines += [
            f"prmt.b32 t, s, 0, {selector};",
            f"shl.b32 t, t, {8 - bits - plane * bits};",
            f"lop3.b32 ${i}, t, {mask};",
        ]
    return decoding("t", lines, pairs, scaled)


@ft.cache
def integers(dtype, pairs: int = 1, scaled: bool = False) -> str:
    """Return PTX that converts int8 codes."""
    selected = ["0x4140", "0x4342"][:pairs]
    if jnp.dtype(dtype) == jnp.float16:
        # The low byte of 1024 + 128 + i is i + 128.
        lines = ["mov.u32 c, 0xe480e480;", "xor.b32 s, s, 0x80808080;"]
        for i, bytes in enumerate(selected):
            lines.append(f"prmt.b32 t, s, 0x64, {bytes};")
            lines.append(f"add.rn.f16x2 ${i}, t, c;")
        return decoding("c, t", lines, pairs, scaled)
    # 128 + the low seven bits, minus 128, or minus 256 if the sign is set.
    lines = ["mov.u32 one, 0x3f803f80;"]
    for i, bytes in enumerate(selected):
        lines += [
            f"prmt.b32 t, s, 0, {bytes};",
            "lop3.b32 p, t, 0x007f007f, 0x43004300, 0xea;",
            "lop3.b32 q, t, 0x00800080, 0xc300c300, 0xea;",
            f"fma.rn.bf16x2 ${i}, p, one, q;",
        ]
    return decoding("t, p, q, one", lines, pairs, scaled)
