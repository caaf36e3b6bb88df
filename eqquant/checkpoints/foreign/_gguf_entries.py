"""Read the tensors of a GGUF file as quantized, plain or decoded arrays."""

import functools as ft
from typing import Any

import numpy as np

from ...formats import FittedFormat, MXFP4
from ._entry import Entry, from_levels, integers_times, NotExact
from ._gguf import GGUFFile, Tensor


# The number of values that are decoded at once.
_chunk = 2**22


def gguf_entries(file: GGUFFile) -> dict[str, Entry]:
    return {name: _entry(file, tensor) for name, tensor in file.tensors.items()}


def _entry(file: GGUFFile, tensor: Tensor) -> Entry:
    where = f"{file.path}: {tensor.name!r} in {tensor.type.name}"
    is_plain = tensor.type.dtype is not None
    return Entry(
        where,
        tensor.shape,
        tensor.type.dtype if is_plain else np.dtype("float32"),
        ft.partial(_plain if is_plain else _decode, file, tensor, where),
        None if is_plain else ft.partial(_quantized, file, tensor),
        (tensor.type.name, tensor.is_exact),
    )


def _plain(file: GGUFFile, tensor: Tensor, where: str) -> np.ndarray:
    del where
    return _raw(file, tensor).view(tensor.type.dtype).reshape(tensor.shape)


def _blocks(file: GGUFFile, tensor: Tensor) -> np.ndarray:
    return _raw(file, tensor).reshape(-1, tensor.type.nbytes)


def _raw(file: GGUFFile, tensor: Tensor) -> np.ndarray:
    if 0 in tensor.shape:
        raise ValueError(
            f"{file.path}: {tensor.name!r} has the shape {tensor.shape}, which has no "
            "elements."
        )
    return file.read(tensor)


def _decode(file: GGUFFile, tensor: Tensor, where: str) -> np.ndarray:
    unpack, block = tensor.type.unpack, tensor.type.block
    if unpack is None:
        raise ValueError(f"{where}: eqquant cannot decode this type.")
    raw = _blocks(file, tensor)
    out, step = np.empty((len(raw), block), np.float32), _chunk // block
    for start in range(0, len(raw), step):
        out[start : start + step] = tensor.type.decode(
            unpack(raw[start : start + step])
        )
    return out.reshape(tensor.shape)


def _quantized(file: GGUFFile, tensor: Tensor):
    kind = tensor.type
    format: Any = kind.format
    if kind.unpack is None:
        raise ValueError(
            f"{file.path}: {tensor.name!r} is in {kind.name}, which eqquant can "
            "neither store nor decode."
        )
    assert kind.format is not None and kind.levels is not None
    if not tensor.is_exact:
        raise NotExact(
            f"has blocks of {kind.block}, which cross its rows of {tensor.shape[-1]}."
        )
    raw = _blocks(file, tensor)
    step = _chunk // kind.block
    parts = [kind.unpack(raw[i : i + step]) for i in range(0, len(raw), step)]
    *lead, size = tensor.shape
    whole = lambda get: np.concatenate([get(p) for p in parts]).reshape(*lead, -1)
    codes = whole(lambda p: p.codes)
    assert codes.shape == (*lead, size)
    # Formats with tables have the codes of the file.
    levels = codes if format.codebook else kind.levels[codes]
    if isinstance(format, MXFP4):
        levels[levels == 8] = 0  # ggml decodes -0 to 0.
    is_k = isinstance(format, FittedFormat) and format.is_k_quant

    def numbers(name: str) -> Any:
        if not is_k:
            return whole(lambda p: getattr(p, name).decode())
        units = whole(lambda p: getattr(p, name).signed_units)
        integers = whole(lambda p: getattr(p, name).factors)
        return integers_times(units, integers, format)

    offsets = None if parts[0].offsets is None else numbers("offsets")
    return from_levels(levels, numbers("scales"), format, offsets=offsets)
