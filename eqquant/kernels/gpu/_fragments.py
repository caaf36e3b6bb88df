"""Decode codes to the `wgmma` operand, in a Mosaic kernel.

A thread decodes two bytes with the PTX of `_lookup.py`. Pallas has no loads with the
addressing of `_fragment_ptx.py`, so this module emits inline PTX and builds Mosaic
arrays from its results. Interpret mode runs `_emulate.py` instead.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ...formats import Format, planes_of
from . import _fragment_ptx as ptx, _table
from ._lookup import Decoder


# The decorator removes the first parameter, which type checkers do not see.
_inlined: Any = plgpu.inline_mgpu


def fill(decoder: Decoder, table) -> None:
    """Fill the table of `_table.py`. Each warpgroup writes all of it, and every
    warpgroup must run this because the PTX contains a barrier."""
    (levels,) = decoder.tables
    constant = lambda i: mgpu.utils.c(int(i), _int(32))

    @_inlined(arg_types=(plgpu.RefType(),), return_type=_words(1)[0])
    def fill(_, table):
        at, entry = _asm(ptx.place_of_entry, "=&r,=&r", [], 2)
        word = constant(0)
        for i, pair in enumerate(_table.first_pairs(levels, decoder.bits)):
            same = arith.cmpi(arith.CmpIPredicate.eq, entry, constant(i))
            word = arith.select(same, constant(pair), word)
        text = _table.filling_of([levels], decoder.bits, 128)
        text = ptx.with_table_at(text, "$3")
        return _array_of(_asm(text, "=r,r,r,r", [at, word, _address(table)]))

    fill(table)


def decode(
    codes, scales, table, decoder: Decoder, format: Format, width: int, transforms
):
    """Return the levels of a step, and the scales of each thread or a zero, for
    [`finish`][].

    `codes` has 128 rows of `width` bytes; a warpgroup has 64 of them. `scales` is None
    if a row has one scale, and `table` is None if no format is looked up.
    """
    blocks = 0 if scales is None else scales.shape[-1]
    refs = tuple(ref for ref in (codes, scales, table) if ref is not None)
    types = (plgpu.RefType(transforms), *(plgpu.RefType() for _ in refs[1:]))
    words, _ = _words(max(2 * blocks, 1))
    texts = [decoder.texts(plane)[0] for plane in range(planes_of(format.bits))]

    @_inlined(arg_types=types, return_type=(_operand(decoder.dtype), words))
    def decode(_, codes, *refs):
        pair = ir.VectorType.get((2,), _number(decoder.dtype))
        at, change = _asm(
            ptx.place_of_codes(width), "=&r,=&r,r", [_address(codes)], 2, pure=True
        )
        scale_words = []
        if not blocks:
            scale_words += _asm(ptx.zero, "=r", [], pure=True)
        else:
            place = _asm(ptx.place_of_scale(), "=r,r", [_address(refs[0])], pure=True)
            for block in range(blocks):
                for half in range(2):
                    text = ptx.load_scale(128 * half + 4 * block)
                    scale_words += _asm(text, "=r,r", place)
        tables = [] if table is None else [_address(refs[-1])]
        out = np.empty((1, 8, 1, 1, 2, 1, 1, 1, 1), object)
        for half in range(2):
            for q, columns in enumerate(ptx.columns_of(format)):
                text = ptx.load_codes(8 * q, 8 * width * half)
                (two,) = _asm(text, "=h,r,r", [at, change], bits=16)
                for column, text in zip(columns, texts, strict=True):
                    text = ptx.with_table_at(text, "$2")
                    kinds = "=r,h,r" if tables else "=r,h"
                    (numbers,) = _asm(text, kinds, [two, *tables])
                    numbers = mgpu.utils.bitcast(numbers, pair)
                    out[0, column, 0, 0, half, 0, 0, 0, 0] = numbers
        layout = mgpu.WGMMA_LAYOUT
        levels = mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)
        return levels, _array_of(scale_words)

    return decode(*refs)


def finish(levels, scales, blocks: int):
    """Return the operand: levels times the `blocks` scales of each row in a step."""
    _, layout = _words(scales.shape[0] // 128)

    @_inlined(
        arg_types=(plgpu.Layout.WGMMA, layout), return_type=_operand(levels.dtype)
    )
    def finish(_, levels, scales):
        (word,) = scales.registers.reshape(-1)
        extract = lambda i: vector.extract(
            word, dynamic_position=[], static_position=[i]
        )
        out = np.empty_like(levels.registers)
        for at in np.ndindex(out.shape):
            column, half = at[1], at[4]
            scale = extract(column * blocks // 8 * 2 + half if blocks else 0)
            numbers = mgpu.utils.bitcast(levels.registers[at], _int(32))
            text = ptx.scaled if blocks else ptx.unscaled
            (numbers,) = _asm(text, "=r,r,r", [numbers, scale])
            out[at] = mgpu.utils.bitcast(numbers, levels.registers[at].type)
        return mgpu.FragmentedArray(
            _registers=out, _layout=levels.layout, _is_signed=None
        )

    return finish(levels, scales)


def store(part, out, transforms) -> None:
    """Store a part of a result with 64 rows of the weight to `out`, transposed."""

    @_inlined(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(transforms)),
        return_type=_words(1)[0],
    )
    def store(_, part, out):
        (at,) = _asm(ptx.place_of_result(), "=r,r", [_address(out)], pure=True)
        for c in range(0, part.registers.shape[1], 2):
            four = [
                mgpu.utils.bitcast(
                    part.registers[0, c + i, 0, 0, half, 0, 0, 0, 0], _int(32)
                )
                for i in range(2)
                for half in range(2)
            ]
            _asm(ptx.store_results(1024 * c), "r,r,r,r,r", [at, *four], 0)
        # JAX drops inline functions without a result.
        return _array_of([at])

    store(part, out)


def _asm(
    text: str,
    constraints: str,
    args: list,
    count: int = 1,
    *,
    bits: int = 32,
    pure: bool = False,
) -> list:
    """Return the `count` results of PTX. It is never moved or dropped unless `pure`."""
    word: Any = _int(bits)
    kind: Any = word if count == 1 else None
    if count > 1:
        kind = ir.Type.parse(f"!llvm.struct<({', '.join([str(word)] * count)})>")
    out: Any = llvm.inline_asm(kind, args, text, constraints, has_side_effects=not pure)
    if count == 1:
        return [out]
    return [llvm.extractvalue(word, out, [i]) for i in range(count)]


def _address(ref):
    """Return the address of a reference in shared memory."""
    return llvm.ptrtoint(_int(32), mgpu.utils.memref_ptr(ref))


def _int(bits: int) -> Any:
    return ir.IntegerType.get_signless(bits)


def _number(dtype):
    narrow = jnp.dtype(dtype) == jnp.float16
    return ir.F16Type.get() if narrow else ir.BF16Type.get()


def _operand(dtype):
    return plgpu.ShapeDtypeStruct((64, 64), dtype, layout=plgpu.Layout.WGMMA)


def _words(count: int) -> tuple[Any, Any]:
    """Return the type and layout of `count` words per thread, as a loop carry."""
    shape = (128 * count,)
    layout = plgpu.Layout.WG_STRIDED(shape, count)
    return plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout), layout


def _array_of(words: list):
    kind = ir.VectorType.get((len(words),), _int(32))
    registers = np.empty((1,), object)
    registers[0] = vector.from_elements(kind, words)
    layout = mgpu.WGStridedFragLayout((128 * len(words),), len(words))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)
