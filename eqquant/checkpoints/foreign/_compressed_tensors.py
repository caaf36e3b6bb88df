"""Weights that compressed-tensors packs for llm-compressor and vLLM.

A weight has a row for each output: `weight_packed` is int32 `(outputs, inputs * bits /
32)` and `weight_scale` is `(outputs, groups)`. `weight_shape` holds the number of
inputs, because the last int32 may be partial. Optional zero points are in
`weight_zero_point`, packed along outputs. Codes and zero points are shifted so that the
lowest integer is 0.
"""

import numpy as np

from ..files import Source
from ._entry import Entry
from ._int32 import count_codes, unpack_int32
from ._parts import Parts, prefixes
from ._zero_points import block_order, SCALE_DTYPES, ZeroPointWeight


# 3 bits are excluded: versions of the library packed them in different ways.
_bits = (2, 4, 8)


def compressed_tensors_entries(source: Source) -> dict[str, Entry]:
    entries = {}
    for prefix in prefixes(source, "weight_packed"):
        parts = Parts(source, prefix, "compressed-tensors")
        entries[parts.weight] = _weight(parts).entry()
    return entries


def _weight(parts: Parts) -> ZeroPointWeight:
    rows, packed_columns = parts.look_up(
        "weight_packed", ("int32",), (None, None)
    ).shape
    parts.look_up("weight_shape", ("int64", "int32"), (2,))
    shape = tuple(map(int, parts.read("weight_shape")))
    columns = shape[1]
    candidates = [
        bits
        for bits in _bits
        if packed_columns and packed_columns == _packed_size(columns, bits)
    ]
    if shape[0] != rows or not rows or columns < 1 or len(candidates) != 1:
        raise ValueError(
            f"{parts.where}: 'weight_packed' has the shape {(rows, packed_columns)} "
            f"and 'weight_shape' is {shape}, which fits no packing in {_bits} bits."
        )
    (bits,) = candidates
    scales = parts.look_up("weight_scale", SCALE_DTYPES, (rows, None))
    blocks = scales.shape[1]
    if not blocks or columns % blocks:
        raise ValueError(
            f"{parts.where} has {columns} columns, which do not divide into {blocks} "
            "groups."
        )
    if has_zeros := "weight_zero_point" in parts:
        parts.look_up(
            "weight_zero_point", ("int32",), (_packed_size(rows, bits), blocks)
        )
    if has_order := "weight_g_idx" in parts:
        parts.look_up("weight_g_idx", ("int32",), (columns,))

    def zeros() -> np.ndarray:
        if not has_zeros:
            return np.full((rows, blocks), 2 ** (bits - 1), np.int32)
        packed = parts.read("weight_zero_point")
        return unpack_int32(packed, bits, 0)[:rows].astype(np.int32)

    return ZeroPointWeight(
        "compressed-tensors",
        parts.where,
        (rows, columns),
        scales.dtype,
        tuple(parts.names),
        bits,
        columns // blocks,
        symmetric=not has_zeros,
        codes=lambda: unpack_int32(parts.read("weight_packed"), bits, 1)[:, :columns],
        scales=lambda: parts.read("weight_scale"),
        zeros=zeros,
        order=(lambda: block_order(parts, "weight_g_idx", blocks))
        if has_order
        else None,
    )


def _packed_size(codes: int, bits: int) -> int:
    return -(-codes // count_codes(1, bits))
