"""Weights of one byte, FP8 or integers, times scales: those that compressed-tensors and
vLLM have, and those of Hugging Face's fine-grained FP8.

`weight` is `(outputs, inputs)`. Beside it `weight_scale`, or `weight_scale_inv`, which
multiplies as well, has one number, one for each output, or one for each 128 outputs
and 128 inputs.
"""

import numpy as np

from ...formats import FP8, Int8
from ..files import Source
from ._entry import Entry, from_levels, NotHeld
from ._parts import Parts, prefixes
from ._zero_points import SCALE_DTYPES


_formats = {"float8_e4m3fn": FP8, "int8": Int8}
_tile = 128


def scaled_byte_entries(source: Source) -> dict[str, Entry]:
    entries = {}
    for name in ("weight_scale", "weight_scale_inv"):
        for prefix in prefixes(source, name):
            weight = source.tensors.get(f"{prefix}weight")
            if weight is not None and weight.dtype.name in _formats:
                parts = Parts(source, prefix, "bytes with scales")
                entries[parts.weight] = _entry(parts, name)
    return entries


def _entry(parts: Parts, name: str) -> Entry:
    stored = parts.look_up("weight", tuple(_formats), (None, None))
    rows, columns = stored.shape
    if not rows or not columns:
        raise ValueError(f"{parts.where} has the shape {stored.shape}.")
    tiles = -(-rows // _tile), -(-columns // _tile)
    one, of_rows = ((), (1,), (1, 1)), ((rows,), (rows, 1))
    scale = parts.look_up(name, SCALE_DTYPES, *one, *of_rows, tiles)
    is_tiled = scale.shape not in (*one, *of_rows)
    format = _formats[stored.dtype.name](block_size=_tile if is_tiled else None)

    def scales() -> np.ndarray:
        found = parts.read(name).astype(np.float32)
        if is_tiled:
            return np.repeat(found, _tile, axis=0)[:rows]
        return np.broadcast_to(found.reshape(-1, 1), (rows, 1))

    def decode() -> np.ndarray:
        width = _tile if is_tiled else columns
        steps = np.repeat(scales(), width, axis=1)[:, :columns]
        with np.errstate(over="ignore", invalid="ignore"):
            return (parts.read("weight").astype(np.float32) * steps).astype(scale.dtype)

    def quantized():
        levels = parts.read("weight")
        if isinstance(format, FP8):
            if np.any(np.isnan(levels)):
                raise NotHeld("has weights that are not a number.")
            levels = levels.view(np.uint8)
        return from_levels(levels, scales(), format, scale.dtype)

    kind = f"bytes with scales, {format!r}", True
    how = decode, quantized, kind, tuple(parts.names)
    return Entry(parts.where, stored.shape, scale.dtype, *how)
