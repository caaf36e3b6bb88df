"""Inline PTX for the `wgmma` operand in registers: where a thread reads codes and
scales.

The left operand of a `wgmma` is 64 x 64 numbers in the registers of 128 threads. A
thread has two adjacent columns of every eight, in two rows that are eight apart. So
it reads two adjacent bytes of a row at once.
"""

from ...formats import Format, planes_of
from . import _ptx


_row = [  # `r` is the row of a thread among 128 rows, `g` the row among eight.
    "mov.u32 t, %tid.x;",
    "shr.u32 g, t, 2;",
    "and.b32 g, g, 7;",
    "shr.u32 r, t, 5;",
    "mad.lo.u32 r, r, 16, g;",
]
# The place in each block of the table that a thread fills, and the entry.
place_of_entry = _ptx.block(
    "t",
    [
        "mov.u32 t, %tid.x;",
        "and.b32 t, t, 127;",
        "shl.b32 $0, t, 4;",
        "shr.u32 $1, t, 3;",
    ],
)


def place_of_codes(width: int) -> str:
    """Return PTX that sets `$0` to the address of a thread's codes, in 128 rows of
    `width` bytes from `$2` on. Rows longer than 16 bytes are swizzled: 16-byte offsets
    are XORed with `$1`."""
    return _ptx.block(
        "t, r, g",
        [
            *_row,
            f"mul.lo.u32 r, r, {width};",
            "shr.u32 $1, r, 3;",
            f"and.b32 $1, $1, {width - 16};",
            "and.b32 t, t, 3;",
            "mad.lo.u32 r, t, 2, r;",
            "add.u32 $0, r, $2;",
        ],
    )


def load_codes(byte: int, further: int) -> str:
    """Return PTX that loads two bytes of codes, at offset `byte` of the row at `$1`,
    which `$2` swizzles, plus `further` bytes."""
    return _ptx.block(
        "a",
        [
            f"xor.b32 a, $2, {byte // 16 * 16};",
            "add.u32 a, a, $1;",
            f"ld.shared.u16 $0, [a+{byte % 16 + further}];",
        ],
    )


def place_of_scale() -> str:
    """Return PTX that sets `$0` to the address of the scales of a thread's row, in rows
    of 16 bytes from `$1` on."""
    return _ptx.block("t, r, g", [*_row, "mad.lo.u32 $0, r, 16, $1;"])


def load_scale(offset: int) -> str:
    """Return PTX that loads a float32 scale at `$1 + offset` as a pair of bfloat16."""
    return _ptx.block(
        "s", [f"ld.shared.b32 s, [$1+{offset}];", "cvt.rn.bf16x2.f32 $0, s, s;"]
    )


# These are the last instructions before a `wgmma`. Its operand registers may be written
# only after the previous `wgmma` has read them.
scaled = "mul.rn.bf16x2 $0, $1, $2;"
unscaled = "or.b32 $0, $1, $2;"
# A zero that the assembler cannot fold: the third axis of the grid has size one.
zero = "mov.u32 $0, %ctaid.z;"


def place_of_result() -> str:
    """Return PTX that sets `$0` to the address at which a thread calls `store_results`,
    in swizzled rows of 128 bytes from `$1` on."""
    return _ptx.block(
        "t, j, q, h",
        [
            "mov.u32 t, %tid.x;",
            "and.b32 j, t, 7;",
            "shr.u32 h, t, 3;",
            "and.b32 h, h, 1;",
            "shr.u32 q, t, 4;",
            "and.b32 q, q, 6;",  # Twice the index of the warp among four.
            "add.u32 q, q, h;",
            "xor.b32 q, q, j;",
            "shr.u32 h, t, 1;",
            "and.b32 h, h, 8;",
            "add.u32 j, j, h;",
            "shl.b32 q, q, 4;",
            "mad.lo.u32 q, j, 128, q;",
            "add.u32 $0, q, $1;",
        ],
    )


def store_results(offset: int) -> str:
    """Return PTX that stores four transposed matrices of 8 x 8 numbers."""
    return (
        f"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0+{offset}], "
        "{$1, $2, $3, $4};"
    )


def columns_of(format: Format) -> list[list[int]]:
    """Return the group of eight columns for each eight bytes of 64 codes and each
    plane."""
    planes = planes_of(format.bits)
    run = 8 if planes == 1 else format.group // planes // 8
    group = lambda q, plane: q // run * run * planes + plane * run + q % run
    return [[group(q, plane) for plane in range(planes)] for q in range(format.bits)]


def with_table_at(asm: str, place: str) -> str:
    """Change PTX of `_table.py` to use a table whose address is in the register
    `place`. All memory of Mosaic is dynamic, so it cannot declare a static table."""
    lines = asm.splitlines()
    declared = lines[0].startswith(".shared")
    return "\n".join(lines[declared:]).replace("levels", place)
