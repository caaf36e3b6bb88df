"""A table in shared memory that maps two codes to two 16-bit numbers.

Two codes of at most four bits form an index of at most eight bits. One load returns
both numbers. Each memory bank has a copy of the table, so that lanes never conflict: 32
KiB for 4-bit codes. If two numbers represent a level, an entry has both, and two lanes
share a copy.

Pallas has no load from shared memory with a computed index, so inline PTX declares
the table. It is static memory; Triton's memory is dynamic. It is filled once, before
the loop of a kernel. The filling returns a zero that is opaque to the compiler.
Adding the zero to the rows that are loaded orders lookups after the filling.
"""

import functools as ft

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from . import _ptx


_entry = 128  # Bytes: one word per bank.
_block = 16 * _entry  # Bytes that all threads fill at once.


def index_bits(bits: int) -> int:
    """Return the bits of a code in the index. Codes of 3 bits use a table of 4 bits,
    in which 16 consecutive entries have the same second code."""
    return 4 if bits == 3 else bits


def size_of(bits: int) -> int:
    """Return the bytes of a table."""
    return max(_entry * 4**bits, _block)


def _pairs(table: np.ndarray, bits: int) -> np.ndarray:
    """Return the entries. The second code is in the high bits of index and entry."""
    numbers = table.view(np.uint16).astype(np.uint32)
    return (numbers[:, None] << 16 | numbers).reshape(4**bits).view(np.int32)


def fill(tables: list[np.ndarray], bits: int, threads: int) -> Int32[Array, ""]:
    """Fill the table in a kernel, before any lookup. Return a zero that depends on it.

    **Arguments:**

    - `tables`: one or two tables of 16-bit numbers by code.
    - `bits`: bits of a code.
    - `threads`: threads of the kernel, at least 128. Each runs the PTX once, because a
        second run would declare the table again.
    """
    each = _block // threads
    index = lax.broadcasted_iota(jnp.int32, (threads,), 0)
    entry = lax.div(index, _entry // each)
    args = [index * each]
    for table in tables:
        word = jnp.zeros((threads,), jnp.int32)
        for i, pair in enumerate(first_pairs(table, bits)):
            word = jnp.where(entry == i, jnp.int32(pair), word)
        args.append(word)
    asm = filling_of(tables, bits, threads)
    constraints = ",".join(["=r", *["r"] * len(args)])
    return jnp.max(_ptx.run(asm, args, jnp.int32, constraints, pack=1))


def first_pairs(table: np.ndarray, bits: int) -> np.ndarray:
    """Return the first 16 entries as int32. A smaller table is repeated."""
    return np.resize(_pairs(table, bits), 16)


def filling_of(tables: list[np.ndarray], bits: int, threads: int) -> str:
    """Return the PTX by which `threads` threads fill the table."""
    changes = tuple(tuple(_changes(table, bits)) for table in tables)
    return filling(changes, _block // threads // 4)


def _changes(table: np.ndarray, bits: int) -> list[int]:
    """Return the XOR of every 16th entry with the first one."""
    pairs = _pairs(table, bits).view(np.uint32)
    return [int(entry ^ pairs[0]) for entry in pairs[::16]]


@ft.cache
def filling(changes: tuple[tuple[int, ...], ...], each: int) -> str:
    """Return PTX that fills the table. A thread writes `each` words from byte `$1` on,
    and the same words of every 16th entry that follows. The first entry is `$2`, or
    `$2` and `$3` if there are two tables."""
    lines = ["mov.u32 a, levels;", "add.u32 a, a, $1;"]
    for i in range(len(changes[0])):
        names = ["v", "w"][: len(changes)]
        for j, name in enumerate(names):
            lines.append(f"xor.b32 {name}, ${2 + j}, {changes[j][i]:#010x};")
        words = ", ".join((names * each)[:each])
        lines.append(f"st.shared.v{each}.b32 [a+{i * _block}], {{{words}}};")
    lines += ["bar.sync 0;", "mov.u32 $0, 0;"]
    declared = f".shared .align 1024 .b8 levels[{len(changes[0]) * _block}];\n"
    return declared + _ptx.block("a, v, w", lines)


@ft.cache
def looked_up(
    bits: int,
    plane: int,
    part: int,
    parts: int,
    pairs: int = 1,
    scaled: bool = False,
    join: tuple[str, ...] = (),
) -> str:
    """Return PTX that looks up a plane of `pairs` pairs of bytes in table `part` of
    `parts`."""
    mask = 0x01010101 * (2**bits - 1)
    shift, bits = plane * bits, index_bits(bits)
    lines = [
        "mov.u32 l, %laneid;",
        f"and.b32 l, l, {32 // parts - 1};",
        f"shl.b32 l, l, {1 + parts};",
        f"shr.u32 s, s, {shift};",
        f"and.b32 s, s, {mask:#010x};",
        # Codes are eight bits apart. Move one to bit 7 and the other next to it.
        f"mul.lo.u32 s, s, {1 << 7 | 1 << (bits - 1):#x};",
    ]
    for i in range(pairs):
        lines += [
            f"shr.u32 t, s, {16 * i};",
            f"lop3.b32 t, t, {(4**bits - 1) << 7:#x}, l, 0xea;",
            "mov.u32 a, levels;",
            "add.u32 a, a, t;",
            f"ld.shared.b32 ${i}, [a+{4 * part}];",
        ]
    return _ptx.decoding("t, a, l", lines, pairs, scaled, join)
