"""Where a thread of a warpgroup has what tensor cores multiply: as inline PTX.

`wgmma` takes 64 x 64 numbers of its left operand in registers of 128 threads. Of eight
columns a thread has two beside each other, in two rows that are eight apart. So it
reads two bytes of a row at once.
"""

from ...formats import Format, planes_of
from . import _ptx


_row = [  # In `r`, that of a thread of 256, of 128 rows; in `g`, of eight rows which.
    "mov.u32 t, %tid.x;",
    "shr.u32 g, t, 2;",
    "and.b32 g, g, 7;",
    "shr.u32 r, t, 5;",
    "mad.lo.u32 r, r, 16, g;",
]
# What a thread of 128 fills of each block of the table, and with which of its entries.
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
    """PTX: of a thread, in 128 rows of so many bytes from `$2` on, `$0` is the place of
    its codes. Rows longer than 16 bytes are swizzled, for which places of 16 bytes are
    changed by `$1`."""
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
    """PTX: two codes, or more, `byte` bytes of a row behind `$1`, whose place `$2`
    changes, and `further` bytes behind that."""
    return _ptx.block(
        "a",
        [
            f"xor.b32 a, $2, {byte // 16 * 16};",
            "add.u32 a, a, $1;",
            f"ld.shared.u16 $0, [a+{byte % 16 + further}];",
        ],
    )


def place_of_scale() -> str:
    """PTX: that of a thread's row, in rows of 16 bytes from `$1` on."""
    return _ptx.block("t, r, g", [*_row, "mad.lo.u32 $0, r, 16, $1;"])


def load_scale(offset: int) -> str:
    """PTX: a scale in float32, so many bytes behind `$1`, as two of bfloat16."""
    return _ptx.block(
        "s", [f"ld.shared.b32 s, [$1+{offset}];", "cvt.rn.bf16x2.f32 $0, s, s;"]
    )


# Last of all, after the product before has read its operand: until then nothing may
# write what the next one reads.
scaled = "mul.rn.bf16x2 $0, $1, $2;"
unscaled = "or.b32 $0, $1, $2;"
# A zero of which the assembler does not know. The third axis of the grid has one place.
zero = "mov.u32 $0, %ctaid.z;"


def place_of_result() -> str:
    """PTX: where a thread's eight numbers go, of 64 columns in swizzled rows of 128
    bytes from `$1` on, by `store_results`."""
    return _ptx.block(
        "t, j, q, h",
        [
            "mov.u32 t, %tid.x;",
            "and.b32 j, t, 7;",
            "shr.u32 h, t, 3;",
            "and.b32 h, h, 1;",
            "shr.u32 q, t, 4;",
            "and.b32 q, q, 6;",  # Twice the warp, of four.
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
    """PTX: four times 8 x 8 numbers, turned."""
    return (
        f"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0+{offset}], "
        "{$1, $2, $3, $4};"
    )


def columns_of(format: Format) -> list[list[int]]:
    """Where codes are: of each eight bytes of 64 codes, and of each plane of these,
    which eight columns."""
    planes = planes_of(format.bits)
    run = 8 if planes == 1 else format.group // planes // 8
    of = lambda q, plane: q // run * run * planes + plane * run + q % run
    return [[of(q, plane) for plane in range(planes)] for q in range(format.bits)]


def with_table_at(asm: str, place: str) -> str:
    """PTX of `_table.py` for a table at an address in a register: Mosaic's memory is
    all dynamic, and begins where static memory would."""
    lines = asm.splitlines()
    declared = lines[0].startswith(".shared")
    return "\n".join(lines[declared:]).replace("levels", place)
