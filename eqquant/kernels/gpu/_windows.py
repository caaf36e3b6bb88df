"""Decode codes with a history, whose levels depend on a window of the bit stream.

The kernel reads words of 32 bits, and the word before each word. Their funnel shift
moves the window of a code to the place of an index, and one load from shared memory
returns the level of that state. The words before a block are zero.

Codes of 3 bits have two parts in each block: words with their low 2 bits, and words
with the high bits of the codes of two such words, in the even and in the odd bits. The
high bits of a word of low bits move to its lower half. A window of each part is then
part of the index.
"""

import functools as ft

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Shaped, UInt32

from ..._jax import apart
from ...formats import Format, is_in_two_parts, parts_of, planes_of
from . import _ptx


WORD = 4  # Bytes
_entry = 2  # Bytes of a level in the table.
_most_bits = 12  # Of a window. The table takes 8 KiB.


def can_decode(format: Format) -> bool:
    """Return whether codes with a history can be decoded."""
    block = (format.block_size or 0) * parts_of_codes(format)[0]
    return (
        format.bits in (2, 3, 4)
        and window_of(format) <= _most_bits
        and format.integer_levels
        and format.largest_level <= 256  # bfloat16 represents them exactly.
        and block % (8 * WORD) == 0
    )


def window_of(format: Format) -> int:
    """Return the bits of a window: those of a code, and of the codes before it."""
    return format.bits * (format.history + 1)


def table_bytes(format: Format) -> int:
    """Return the bytes of shared memory that the table of a format takes."""
    return _entry << window_of(format)


def parts_of_codes(format: Format) -> tuple[int, ...]:
    """Return the bits of each part of a code."""
    return parts_of(format.bits) if is_in_two_parts(format.bits) else (format.bits,)


def planes_of_word(format: Format) -> int:
    """Return the number of codes in a word, or in a word of the low part."""
    return WORD * planes_of(format.bits)


def words(codes: Array) -> Int32[Array, "*lead words"]:
    """Return the words of rows of codes. XLA does not copy them."""
    codes = codes.reshape(*codes.shape[:-1], -1, WORD)
    return lax.bitcast_convert_type(codes, jnp.int32)


@ft.lru_cache(maxsize=64)
def table_of(format: Format, dtype) -> Int32[np.ndarray, " words"]:
    """Return the levels by index, two in a word. With one part, an index is a state.
    With two, the high parts of the codes of a window follow the low parts."""

    def table() -> np.ndarray:
        count = format.history + 1
        index, states = np.arange(2 ** window_of(format)), 0
        first = place = 0
        for bits in parts_of_codes(format):
            for code in range(count):
                part = index >> (first + code * bits) & (2**bits - 1)
                states = states | part << (code * format.bits + place)
            first, place = first + count * bits, place + bits
        levels = format.levels(jnp.asarray(states), jnp.float32)
        return np.asarray(levels).astype(dtype).view(np.int32)

    return apart(table)


def odd_bits(format: Format, size: int) -> list[Int32[np.ndarray, " words"]]:
    """Return the bits by which words of high parts, and those before them, are shifted
    to the right: for `size` words of low parts or one block, whichever is longer.
    Return nothing if codes have one part."""
    assert format.block_size is not None
    if not is_in_two_parts(format.bits):
        return []
    low, high = (
        format.block_size * bits // (8 * WORD) for bits in parts_of(format.bits)
    )
    position = np.arange(max(size, low)) % low
    before = np.maximum(position - 1, 0)
    return [(i // high).astype(np.int32) for i in (position, before)]


class WindowDecoder:
    """Decode words of codes with a history, in the same steps as [`Decoder`][] decodes
    other codes."""

    scale = 1.0

    def __init__(self, format: Format, dtype, interpret: bool):
        self.format, self.dtype, self.interpret = format, jnp.dtype(dtype), interpret
        self.table = table_of(format, self.dtype)

    def prepare(self, threads: int, table) -> Int32[Array, ""] | int:
        """Fill the table in shared memory from the array `table`, in a kernel of
        `threads` threads before its loop. Return a zero on which the loads of codes
        must depend."""
        if self.interpret:
            return 0
        # Some versions of jaxlib have no Triton.
        from jax.experimental.pallas import triton as plgpu

        index = lax.broadcasted_iota(jnp.int32, (threads,), 0)
        count = self.table.size // threads
        args = [index * WORD]
        args += [plgpu.load(table.at[index + i * threads]) for i in range(count)]
        constraints = ",".join(["=r", *["r"] * len(args)])
        asm = filling(count, threads)
        return jnp.max(_ptx.run(asm, args, jnp.int32, constraints, pack=1))

    def __call__(
        self,
        codes: list[Int32[Array, "..."]],
        plane: int,
        scale: Shaped[Array, "rows words"] | None = None,
    ) -> list[Shaped[Array, "rows words"]]:
        """Return a plane of a tile as one number per weight, times `scale` if there is
        one.

        `codes` are words and the words before them, of each part. If there are two
        parts, two arrays of [`odd_bits`][] follow, and in interpret mode the table.
        """
        if self.interpret:
            out = self._interpreted(codes, plane)
            return [out if scale is None else out * scale]
        args = codes if scale is None else [*codes, scale]
        sizes = (arg.dtype.itemsize // 2 for arg in args)
        constraints = ",".join(["=r", *["r"] * sum(sizes)])
        asm = self.text(plane, scale is not None)
        return [_ptx.run(asm, args, self.dtype, constraints, pack=2)]

    def text(self, plane: int, scaled: bool) -> str:
        """Return the PTX of a plane."""
        return looked_up(self.format.bits, self.format.history, plane, scaled)

    def _interpreted(self, codes, plane: int) -> Shaped[Array, "rows words"]:
        *codes, table = codes
        word, before, *high = [c.astype(jnp.uint32) for c in codes]
        low_bits, *high_bits = parts_of_codes(self.format)
        count = self.format.history + 1
        index = _window(word, before, (plane + 1) * low_bits, count * low_bits)
        for bits in high_bits:
            word, before, odd, odd_before = high
            word, before = _even_bits(word >> odd), _even_bits(before >> odd_before)
            stream = before | word << 16
            above = stream >> (16 + (plane + 1) * bits - count * bits)
            above = above & (2 ** (count * bits) - 1)
            index = index | above << (count * low_bits)
        levels = lax.bitcast_convert_type(table, self.dtype).reshape(-1)
        return levels.at[index.astype(jnp.int32)].get(mode="promise_in_bounds")


def _window(word, before, end: int, size: int):
    """Return the `size` bits before bit `end` of words."""
    first = end - size
    bits = word >> first if first >= 0 else before >> (32 + first) | word << -first
    return bits & (2**size - 1)


_compress = (1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)


def _even_bits(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Move the even bits of words to their lower halves."""
    x = x & 0x55555555
    for shift, mask in _compress:
        x = (x | x >> shift) & mask
    return x


@ft.cache
def filling(count: int, threads: int) -> str:
    """Return PTX with which a thread stores `count` words. The first has the offset of
    `$1` bytes in the table, and the others follow at a distance of `threads` words."""
    lines = ["mov.u32 a, levels;", "add.u32 a, a, $1;"]
    for i in range(count):
        lines.append(f"st.shared.b32 [a+{i * threads * WORD}], ${i + 2};")
    lines += ["bar.sync 0;", "mov.u32 $0, 0;"]
    declared = f".shared .align 1024 .b8 levels[{count * threads * WORD}];\n"
    return declared + _ptx.block("a", lines)


@ft.cache
def looked_up(bits: int, history: int, plane: int, scaled: bool) -> str:
    """Return PTX that looks up a plane of two words."""
    low_bits, high_bits = parts_of(bits) if is_in_two_parts(bits) else (bits, 0)
    count, pairs = history + 1, 6 if high_bits else 2
    size, high_size = count * low_bits, count * high_bits
    lines = []
    for i, level in enumerate(["v", "w"]):
        # Operands of two words each. An index is shifted by one bit, to be in bytes.
        word, before, *high = (f"${1 + 2 * pair + i}" for pair in range(pairs))
        mask = f"{(2**size - 1) * _entry:#x}"
        lines += _funnel("t", word, before, (plane + 1) * low_bits - size - 1)
        lines.append(f"and.b32 t, t, {mask};")
        if high:
            lines += _high_stream(*high)
            first = 16 + (plane + 1) * high_bits - high_size - size - 1
            mask = f"{(2**high_size - 1) * _entry << size:#x}"
            lines.append(f"shr.u32 h, h, {first};")
            lines.append(f"lop3.b32 t, h, {mask}, t, 0xea;")
        lines += ["mov.u32 a, levels;", "add.u32 a, a, t;"]
        lines.append(f"ld.shared.u16 {level}, [a];")
    lines.append("prmt.b32 $0, v, w, 0x5410;")
    if scaled:
        lines.append("mov.u32 z, 0x80008000;")  # -0, the neutral addend of a product.
        lines.append(f"fma.rn.bf16x2 $0, $0, ${1 + 2 * pairs}, z;")
    return _ptx.block("t, a, v, w, z, h, e, o", lines)


def _funnel(out: str, word: str, before: str, first: int) -> list[str]:
    """Return PTX that moves bit `first` of a word, or of the word before it, to bit
    0."""
    if first >= 0:
        return [f"shr.u32 {out}, {word}, {first};"]
    return [f"shf.r.wrap.b32 {out}, {before}, {word}, {32 + first};"]


def _high_stream(word: str, before: str, odd: str, odd_before: str) -> list[str]:
    """Return PTX that writes the high bits of two words to `h`, the earlier lowest."""
    lines = []
    for out, register, shift in (("e", word, odd), ("h", before, odd_before)):
        lines.append(f"shr.u32 {out}, {register}, {shift};")
        lines.append(f"and.b32 {out}, {out}, 0x55555555;")
        for distance, mask in _compress:
            lines.append(f"shr.u32 o, {out}, {distance};")
            lines.append(f"or.b32 {out}, {out}, o;")
            lines.append(f"and.b32 {out}, {out}, {mask:#010x};")
    return [*lines, "shl.b32 e, e, 16;", "or.b32 h, h, e;"]
