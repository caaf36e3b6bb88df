"""Weights that compressed-tensors packs, for llm-compressor and vLLM.

A weight has a row for each output: `weight_packed` is int32 of `(outputs, inputs * bits
/ 32)`, `weight_scale` is `(outputs, groups)`, and `weight_shape` says how many inputs
there are, as the last word may not be full. Where there are zero points, they are in
`weight_zero_point`, packed along outputs. Codes and zeros are stored with the lowest
integer as 0.
"""

import numpy as np

from ..files import Source
from ._entry import Entry
from ._parts import Parts, prefixes
from ._words import holds, unpack_words
from ._zero_points import block_order, SCALE_DTYPES, ZeroPointWeight


# Three bits were laid out in another way once.
_bits = (2, 4, 8)


def compressed_tensors_entries(source: Source) -> dict[str, Entry]:
    entries = {}
    for prefix in prefixes(source, "weight_packed"):
        parts = Parts(source, prefix, "compressed-tensors")
        entries[parts.weight] = _weight(parts).entry()
    return entries


def _weight(parts: Parts) -> ZeroPointWeight:
    rows, words = parts.look_up("weight_packed", ("int32",), (None, None)).shape
    parts.look_up("weight_shape", ("int64", "int32"), (2,))
    shape = tuple(map(int, parts.read("weight_shape")))
    columns = shape[1]
    found = [bits for bits in _bits if words and words == _words(columns, bits)]
    if shape[0] != rows or not rows or columns < 1 or len(found) != 1:
        raise ValueError(
            f"{parts.where} has 'weight_packed' of {(rows, words)}, and 'weight_shape' "
            f"says {shape}: eqquant knows no packing in {_bits} bits that makes this."
        )
    (bits,) = found
    scales = parts.look_up("weight_scale", SCALE_DTYPES, (rows, None))
    blocks = scales.shape[1]
    if not blocks or columns % blocks:
        raise ValueError(
            f"{parts.where} has {columns} columns, which do not make {blocks} groups."
        )
    if has_zeros := "weight_zero_point" in parts:
        parts.look_up("weight_zero_point", ("int32",), (_words(rows, bits), blocks))
    if has_order := "weight_g_idx" in parts:
        parts.look_up("weight_g_idx", ("int32",), (columns,))

    def zeros() -> np.ndarray:
        if not has_zeros:
            return np.full((rows, blocks), 2 ** (bits - 1), np.int32)
        packed = parts.read("weight_zero_point")
        return unpack_words(packed, bits, 0)[:rows].astype(np.int32)

    return ZeroPointWeight(
        "compressed-tensors",
        parts.where,
        (rows, columns),
        scales.dtype,
        tuple(parts.names),
        bits,
        columns // blocks,
        symmetric=not has_zeros,
        codes=lambda: unpack_words(parts.read("weight_packed"), bits, 1)[:, :columns],
        scales=lambda: parts.read("weight_scale"),
        zeros=zeros,
        order=(lambda: block_order(parts, "weight_g_idx", blocks))
        if has_order
        else None,
    )


def _words(codes: int, bits: int) -> int:
    return -(-codes // holds(1, bits))
