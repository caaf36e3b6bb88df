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
from ._ptx import decoding, on_bytes


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
    """Codes to `parts` numbers of `dtype` whose sum, times `unit`, is the level; so
    many pairs of codes at once."""

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
            # The highest bit of the exponent alone is a 2.
            levels, self.scale = levels * 2, 0.5
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
        self,
        codes: Shaped[Array, "rows bytes"],
        plane: int,
        scale: Shaped[Array, "rows bytes"] | None = None,
    ) -> list[Shaped[Array, "rows bytes"]]:
        """One plane of a tile: its parts, the largest first. With a scale, which is a
        number of `dtype` as well, its only part is scaled."""
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
        """The PTX of each part."""
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
    """PTX that brings the bits of a plane of the codes to the top of numbers."""
    mask = "0x80008000, 0x40004000, 0xea" if bits == 1 else "0xc000c000, 0, 0xea"
    lines = []
    for i, moved in enumerate(["0x1404", "0x3424"][:pairs]):
        lines += [
            f"prmt.b32 t, s, 0, {moved};",
            f"shl.b32 t, t, {8 - bits - plane * bits};",
            f"lop3.b32 ${i}, t, {mask};",
        ]
    return decoding("t", lines, pairs, scaled)


@ft.cache
def integers(dtype, pairs: int = 1, scaled: bool = False) -> str:
    """PTX that converts integers of 8 bits."""
    selected = ["0x4140", "0x4342"][:pairs]
    if jnp.dtype(dtype) == jnp.float16:
        # 1024 + 128 + i, whose low byte is i + 128.
        lines = ["mov.u32 c, 0xe480e480;", "xor.b32 s, s, 0x80808080;"]
        for i, bytes in enumerate(selected):
            lines.append(f"prmt.b32 t, s, 0x64, {bytes};")
            lines.append(f"add.rn.f16x2 ${i}, t, c;")
        return decoding("c, t", lines, pairs, scaled)
    # 128 + the low seven bits, less 128, or 256 if the sign is set.
    lines = ["mov.u32 one, 0x3f803f80;"]
    for i, bytes in enumerate(selected):
        lines += [
            f"prmt.b32 t, s, 0, {bytes};",
            "lop3.b32 p, t, 0x007f007f, 0x43004300, 0xea;",
            "lop3.b32 q, t, 0x00800080, 0xc300c300, 0xea;",
            f"fma.rn.bf16x2 ${i}, p, one, q;",
        ]
    return decoding("t, p, q, one", lines, pairs, scaled)
