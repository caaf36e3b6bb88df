"""Read the tensors of a GGUF file as quantized, plain or decoded arrays."""

import functools as ft
import importlib
import math
from typing import Any

import jax
import numpy as np

from ..files import release
from ._entry import ByRows, Entry, from_parts, NotExact
from ._ggml_repack import parts_of_block, repacked
from ._gguf import GGUFFile, Tensor


# The number of values that are decoded at once, and that are repacked at once.
# Smaller parts take longer: on a Zen 4, 2**19 instead of 2**21 for 1.1 GB of Q4_1.
_chunk, _part = 2**22, 2**21


def gguf_entries(file: GGUFFile) -> dict[str, Entry]:
    return {name: _entry(file, tensor) for name, tensor in file.tensors.items()}


def _entry(file: GGUFFile, tensor: Tensor) -> Entry:
    where = f"{file.path}: {tensor.name!r} in {tensor.type.name}"
    is_plain = tensor.type.dtype is not None
    by_rows = None
    if not is_plain:
        read = ft.partial(_read_rows, file, tensor)
        by_rows = ByRows(read, ft.partial(_build, tensor), _places(tensor))
    return Entry(
        where,
        tensor.shape,
        tensor.type.dtype if is_plain else np.dtype("float32"),
        ft.partial(_plain if is_plain else _decode, file, tensor, where),
        None if by_rows is None else by_rows.read_all,
        (tensor.type.name, tensor.is_exact),
        by_rows=by_rows,
        abstract=ft.partial(_abstract, tensor) if tensor.is_exact else None,
    )


def _places(tensor: Tensor) -> list[slice]:
    """Return slices of rows of about `_part` values. One row may be longer."""
    rows, *others = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
    step = max(1, _part // max(1, math.prod(others)))
    return [slice(i, min(i + step, rows)) for i in range(0, max(1, rows), step)]


def _plain(file: GGUFFile, tensor: Tensor, where: str) -> np.ndarray:
    del where
    return _raw(file, tensor).view(tensor.type.dtype).reshape(tensor.shape)


def _blocks(file: GGUFFile, tensor: Tensor, rows: slice | None = None) -> np.ndarray:
    return _raw(file, tensor, rows).reshape(-1, tensor.type.nbytes)


def _raw(file: GGUFFile, tensor: Tensor, rows: slice | None = None) -> np.ndarray:
    if 0 in tensor.shape:
        raise ValueError(
            f"{file.path}: {tensor.name!r} has the shape {tensor.shape}, which has no "
            "elements."
        )
    return file.read(tensor, rows)


def _decode(file: GGUFFile, tensor: Tensor, where: str) -> np.ndarray:
    unpack, block = tensor.type.unpack, tensor.type.block
    raw = _blocks(file, tensor)
    if unpack is None:
        return _decode_elsewhere(raw, tensor, where)
    out, step = np.empty((len(raw), block), np.float32), _chunk // block
    for start in range(0, len(raw), step):
        out[start : start + step] = tensor.type.decode(
            unpack(raw[start : start + step])
        )
        release(raw[start : start + step])
    return out.reshape(tensor.shape)


def _decode_elsewhere(raw: np.ndarray, tensor: Tensor, where: str) -> np.ndarray:
    """Decode by the tables of llama.cpp's own package, if it is installed."""
    try:
        quants = importlib.import_module("gguf.quants")
        values = quants.dequantize(raw, quants.GGMLQuantizationType[tensor.type.name])
    except (ImportError, KeyError, NotImplementedError) as problem:
        raise ValueError(
            f"{where}: eqquant cannot decode this type without the package gguf: "
            f"`pip install gguf`, or write another type with `llama-quantize "
            "--allow-requantize` of llama.cpp."
        ) from problem
    return values.reshape(tensor.shape)


def _read_rows(file: GGUFFile, tensor: Tensor, rows: slice, out: Any = None) -> tuple:
    """Read the codes, scales and offsets of some rows, into `out` if it is given and a
    native kernel repacks them."""
    kind = tensor.type
    if kind.unpack is None:
        raise NotExact(f"is in {kind.name}, whose grids of levels have no format.")
    if not tensor.is_exact:
        raise NotExact(
            f"has blocks of {kind.block}, which cross its rows of {tensor.shape[-1]}."
        )
    raw = _blocks(file, tensor, rows)
    lead = (rows.stop - rows.start, *tensor.shape[1:-1])
    # Fields of blocks are copied here.
    parts = repacked(kind, raw, out)
    parts = jax.tree.map(lambda part: part.reshape(*lead, -1), parts)
    release(raw)
    return parts


def _abstract(tensor: Tensor) -> Any:
    *lead, size = tensor.shape
    assert tensor.type.format is not None
    count = size // tensor.type.block

    def whole(part: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, count * part.shape[-1]), part.dtype)

    make = ft.partial(from_parts, format=tensor.type.format, size=size)
    return jax.eval_shape(make, jax.tree.map(whole, parts_of_block(tensor.type.name)))


def _build(tensor: Tensor, parts: Any):
    if len(tensor.shape) == 1:
        parts = jax.tree.map(lambda part: part[..., 0, :], parts)
    assert tensor.type.format is not None
    return from_parts(parts, tensor.type.format, size=tensor.shape[-1])
