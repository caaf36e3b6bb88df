"""Codes to the operand of a tensor core, in a kernel of Mosaic GPU.

`wgmma` takes 64 x 64 numbers of its left operand in registers of 128 threads. Of eight
columns a thread has two beside each other, in two rows that are eight apart. So it
reads two bytes of a row at once, and decodes them as `_lookup.py` does, whose PTX is
used.

Pallas has no such loads. What is here is inline PTX, and Mosaic's arrays made of it.
Interpret mode knows neither: there `_mosaic.py` computes the same.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ...formats import Format, planes_of
from . import _ptx, _table
from ._lookup import Decoder


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


def fill(decoder: Decoder, table) -> None:
    """Before the threads part: the table of `_table.py`, which each warpgroup writes
    whole. All have to be here, as all wait."""
    import jax.experimental.mosaic.gpu as mgpu
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    (levels,) = decoder.tables
    constant = lambda i: mgpu.utils.c(int(i), ir.IntegerType.get_signless(32))

    @_inlined((plgpu.RefType(),), return_type=_words(1)[0])
    def fill(_, table):
        at, entry = _asm(place_of_entry, "=&r,=&r", [], 2)
        word = constant(0)
        for i, pair in enumerate(_table.first_pairs(levels, decoder.bits)):
            same = arith.cmpi(arith.CmpIPredicate.eq, entry, constant(i))
            word = arith.select(same, constant(pair), word)
        text = _table.filling_of([levels], decoder.bits, 128)
        text = with_table_at(text, "$3")
        return _array_of(_asm(text, "=r,r,r,r", [at, word, _address(table)]))

    fill(table)


def decode(
    codes, scales, table, decoder: Decoder, format: Format, width: int, transforms
):
    """Of a step, levels, and for each thread its scales, or a zero, which `finish`
    wants. `codes` are in 128 rows of `width` bytes, of which a warpgroup has 64;
    `scales` are None if a row has one, and `table` if nothing is looked up."""
    import jax.experimental.mosaic.gpu as mgpu
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir

    blocks = 0 if scales is None else scales.shape[-1]
    refs = tuple(ref for ref in (codes, scales, table) if ref is not None)
    types = (plgpu.RefType(transforms), *(plgpu.RefType() for _ in refs[1:]))
    words, _ = _words(max(2 * blocks, 1))
    texts = [decoder.texts(plane)[0] for plane in range(planes_of(format.bits))]

    @_inlined(arg_types=types, return_type=(_operand(decoder.dtype), words))
    def decode(_, codes, *refs):
        pair = ir.VectorType.get((2,), _number(decoder.dtype))
        at, change = _asm(
            place_of_codes(width), "=&r,=&r,r", [_address(codes)], 2, pure=True
        )
        units = []
        if not blocks:
            units += _asm(zero, "=r", [], pure=True)
        else:
            of = _asm(place_of_scale(), "=r,r", [_address(refs[0])], pure=True)
            for block in range(blocks):
                for half in range(2):
                    text = load_scale(128 * half + 4 * block)
                    units += _asm(text, "=r,r", of)
        tables = [] if table is None else [_address(refs[-1])]
        out = np.empty((1, 8, 1, 1, 2, 1, 1, 1, 1), object)
        for half in range(2):
            for q, columns in enumerate(columns_of(format)):
                text = load_codes(8 * q, 8 * width * half)
                (two,) = _asm(text, "=h,r,r", [at, change], bits=16)
                for column, text in zip(columns, texts, strict=True):
                    text = with_table_at(text, "$2")
                    kinds = "=r,h,r" if tables else "=r,h"
                    (numbers,) = _asm(text, kinds, [two, *tables])
                    numbers = mgpu.utils.bitcast(numbers, pair)
                    out[0, column, 0, 0, half, 0, 0, 0, 0] = numbers
        layout = mgpu.WGMMA_LAYOUT
        levels = mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)
        return levels, _array_of(units)

    return decode(*refs)


def finish(levels, units, blocks: int):
    """The operand: levels times scales, if there are `blocks` of them in a row."""
    import jax.experimental.mosaic.gpu as mgpu
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    _, layout = _words(units.shape[0] // 128)

    @_inlined(
        arg_types=(plgpu.Layout.WGMMA, layout), return_type=_operand(levels.dtype)
    )
    def finish(_, levels, units):
        i32 = ir.IntegerType.get_signless(32)
        (word,) = units.registers.reshape(-1)
        of = lambda i: vector.extract(word, dynamic_position=[], static_position=[i])
        out = np.empty_like(levels.registers)
        for at in np.ndindex(out.shape):
            column, half = at[1], at[4]
            unit = of(column * blocks // 8 * 2 + half if blocks else 0)
            numbers = mgpu.utils.bitcast(levels.registers[at], i32)
            text = scaled if blocks else unscaled
            (numbers,) = _asm(text, "=r,r,r", [numbers, unit])
            out[at] = mgpu.utils.bitcast(numbers, levels.registers[at].type)
        return mgpu.FragmentedArray(
            _registers=out, _layout=levels.layout, _is_signed=None
        )

    return finish(levels, units)


def store(some, out, transforms) -> None:
    """A part of a result, of 64 rows of the weight, to `out`, of which these are
    columns."""
    import jax.experimental.mosaic.gpu as mgpu
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir

    @_inlined(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(transforms)),
        return_type=_words(1)[0],
    )
    def store(_, some, out):
        i32 = ir.IntegerType.get_signless(32)
        (at,) = _asm(place_of_result(), "=r,r", [_address(out)], pure=True)
        for c in range(0, some.registers.shape[1], 2):
            four = [
                mgpu.utils.bitcast(
                    some.registers[0, c + i, 0, 0, half, 0, 0, 0, 0], i32
                )
                for i in range(2)
                for half in range(2)
            ]
            _asm(store_results(1024 * c), "r,r,r,r,r", [at, *four], 0)
        # What returns nothing is left out.
        return _array_of([at])

    store(some, out)


def _inlined(arg_types: tuple = (), *, return_type) -> Any:
    """A decorator: what Mosaic runs, of arrays and references."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)


def _asm(
    text: str,
    constraints: str,
    args: list,
    count: int = 1,
    *,
    bits: int = 32,
    pure: bool = False,
) -> list:
    """So many results of PTX, which stays where it is if it is not `pure`."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    one: Any = ir.IntegerType.get_signless(bits)
    kind: Any = one if count == 1 else None
    if count > 1:
        kind = ir.Type.parse(f"!llvm.struct<({', '.join([str(one)] * count)})>")
    out: Any = llvm.inline_asm(kind, args, text, constraints, has_side_effects=not pure)
    if count == 1:
        return [out]
    return [llvm.extractvalue(one, out, [i]) for i in range(count)]


def _address(ref):
    """In shared memory."""
    import jax.experimental.mosaic.gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))


def _number(dtype):
    from jaxlib.mlir import ir

    narrow = jnp.dtype(dtype) == jnp.float16
    return ir.F16Type.get() if narrow else ir.BF16Type.get()


def _operand(dtype):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.ShapeDtypeStruct((64, 64), dtype, layout=plgpu.Layout.WGMMA)


def _words(count: int) -> tuple[Any, Any]:
    """The type of so many words of each thread, which a loop can carry."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    shape = (128 * count,)
    layout = plgpu.Layout.WG_STRIDED(shape, count)
    return plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout), layout


def _array_of(words: list):
    import jax.experimental.mosaic.gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    kind = ir.VectorType.get((len(words),), ir.IntegerType.get_signless(32))
    registers = np.empty((1,), object)
    registers[0] = vector.from_elements(kind, words)
    layout = mgpu.WGStridedFragLayout((128 * len(words),), len(words))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)
