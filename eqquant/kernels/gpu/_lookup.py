"""Decode codes to the 16-bit numbers that tensor cores multiply.

int8 codes, and integers of 3, 5 and 6 bits, become the mantissa of a number with a
fixed exponent, and the bias is then subtracted. The bits of ternary and binary codes
become the sign and the highest exponent bit. Other codes are looked up in the table of
`_table.py`. Before that, `_two_parts.py` joins the parts of codes of 3, 5 and 6 bits.

Each method is inline PTX, with one text per plane. NVIDIA's assembler merges the
common subexpressions of planes. Interpret mode computes the same numbers in JAX.
"""

import functools as ft

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped

from ...formats import Format, is_in_two_parts
from . import _table, _two_parts, _windows
from ._levels import table_of
from ._ptx import decoding, on_bytes


def can_decode(format: Format) -> bool:
    """Return whether codes of a format can be decoded to 16-bit numbers."""
    if format.history:
        return _windows.can_decode(format)
    if format.bits in (3, 5, 6):
        # There is no table of five bits: two codes would have 2**10 entries.
        return _two_parts.can_join(format) and (format.bits == 3 or _counts(format))
    return format.bits in (1, 2, 4) or (format.bits == 8 and format.integer_levels)


def _counts(format: Format) -> bool:
    """Return whether the levels of codes in two parts are consecutive integers."""
    if format.history or not (is_in_two_parts(format.bits) and format.integer_levels):
        return False
    levels = table_of(format)
    return bool(np.all(levels == levels[0] + np.arange(len(levels))))


# Levels of codes whose highest bit is a sign, by the number of bits.
_signed_codes = {1: {0: 1, 1: -1}, 2: {0: 0, 1: 1, 3: -1}}


def is_signed(format: Format) -> bool:
    """Return whether a code is a sign bit and a bit for a nonzero level."""
    levels = _signed_codes.get(format.bits, {})
    return format.unit_levels and all(
        levels.get(code) == table_of(format)[code] for code in format.used_codes
    )


def in_table(format: Format) -> bool:
    """Return whether codes are looked up in a table."""
    return format.bits < 8 and not (is_signed(format) or _counts(format))


def table_bytes(format: Format) -> int:
    """Return the bytes of shared memory that the table of a format takes."""
    if format.history:
        return _windows.table_bytes(format)
    return _table.size_of(_table.index_bits(format.bits)) if in_table(format) else 0


def decoding_of(format: Format) -> str:
    """Describe how codes are decoded."""
    if format.bits == 8 or _counts(format):
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
        self.in_two_parts = is_in_two_parts(self.bits)
        self.tables: list[np.ndarray] = []
        # The level of the first code, if codes in two parts are integers.
        self.lowest = int(table_of(format)[0]) if _counts(format) else None
        if self.bits == 8 or self.lowest is not None:
            return
        levels = np.asarray(table_of(format), np.float32)
        levels = np.resize(levels, 2 ** _table.index_bits(self.bits))
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
        return _table.fill(self.tables, _table.index_bits(self.bits), threads)

    def __call__(
        self,
        codes: list[Shaped[Array, "rows bytes"]],
        plane: int,
        scale: Shaped[Array, "rows bytes"] | None = None,
    ) -> list[Shaped[Array, "rows bytes"]]:
        """Return the parts of a plane of a tile, the largest first. A plane with a
        `scale`, of the dtype `dtype`, has one part, which the scale multiplies.

        `codes` is one array, or three for codes in two parts: the bytes of each part,
        and the rotations of `_two_parts.py`.
        """
        assert scale is None or len(self.tables) < 2
        if self.interpret:
            out = self._interpreted(codes, plane)
            return out if scale is None else [out[0] * scale]
        args = codes if scale is None else [*codes, scale]
        texts = self.texts(plane, scale is not None)
        return [on_bytes(text, args, self.dtype, self.pairs) for text in texts]

    def _interpreted(self, codes, plane: int) -> list:
        if self.bits == 8:
            return [codes[0].astype(self.dtype)]
        if self.in_two_parts:
            low, high, rotation = codes
            index = _two_parts.joined(low, high, rotation, self.bits, plane)
        else:
            index = codes[0] >> jnp.uint8(plane * self.bits)
            index = index & jnp.uint8(2**self.bits - 1)
        if self.lowest is not None:
            return [(index.astype(jnp.int32) + self.lowest).astype(self.dtype)]
        return [_select(table, index) for table in self.tables]

    def texts(self, plane: int, scaled: bool = False) -> list[str]:
        """Return the PTX of each part."""
        parts = max(len(self.tables), 1)
        return [self._text(plane, i, scaled) for i in range(parts)]

    def _text(self, plane: int, part: int, scaled: bool) -> str:
        if self.bits == 8:
            return integers(self.dtype, self.pairs, scaled)
        join = ()
        if self.in_two_parts:
            # The joined codes are the only plane.
            join, plane = _two_parts.join(self.bits, plane), 0
        if self.lowest is not None:
            return counted(self.dtype, self.bits, self.lowest, join, self.pairs, scaled)
        if not self.looks_up:
            return signed(self.bits, plane, self.pairs, scaled)
        parts = len(self.tables)
        return _table.looked_up(self.bits, plane, part, parts, self.pairs, scaled, join)


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


@ft.cache
def counted(
    dtype,
    bits: int,
    lowest: int,
    join: tuple[str, ...],
    pairs: int = 1,
    scaled: bool = False,
) -> str:
    """Return PTX that joins codes in two parts to integers from `lowest` on.

    The low byte of 1024 + i in float16, or of 128 + i in bfloat16, is i.
    """
    dtype = jnp.dtype(dtype)
    base = np.array(1024 if dtype == jnp.float16 else 128, dtype)
    both = lambda number: f"{int(number.view(np.uint16)) * 0x10001:#010x}"
    lines = [f"mov.u32 c, {both((lowest - base).astype(dtype))};"]
    lines += [f"mov.u32 one, {both(np.array(1, dtype))};"]
    add = "fma.rn.f16x2" if dtype == jnp.float16 else "fma.rn.bf16x2"
    for i, bytes in enumerate(["0x4140", "0x4342"][:pairs]):
        lines += [
            f"prmt.b32 t, s, 0, {bytes};",
            f"lop3.b32 t, t, {(2**bits - 1) * 0x10001:#010x}, {both(base)}, 0xea;",
            f"{add} ${i}, t, one, c;",
        ]
    return decoding("c, t, one", lines, pairs, scaled, join)
