"""Write GGUF files, version 3, for llama.cpp, tensor by tensor."""

import pathlib
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np


_ALIGNMENT = 32
_uint32, _float32, _string = 4, 6, 8


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int  # The number of the type in ggml.
    nbytes: int
    data: Callable[[], np.ndarray]


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: int | float | str) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _string) + _text(value)
    if isinstance(value, float):
        return struct.pack("<If", _float32, value)
    return struct.pack("<II", _uint32, value)


def write(
    path: pathlib.Path,
    metadata: Mapping[str, int | float | str],
    tensors: Iterable[Tensor],
) -> None:
    """Write a file. Calls `data()` of one tensor at a time, to limit memory."""
    tensors = list(tensors)
    header = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    header += [_text(key) + _value(value) for key, value in metadata.items()]
    at = 0
    for name, shape, kind, nbytes, _ in tensors:
        # The first axis is contiguous in ggml.
        axes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header.append(_text(name) + axes + struct.pack("<IQ", kind, at))
        at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    with open(path, "wb") as file:
        file.write(b"".join(header))
        for tensor in tensors:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            data = tensor.data()
            if data.nbytes != tensor.nbytes:
                raise ValueError(
                    f"{tensor.name}: {data.nbytes} bytes; expected {tensor.nbytes}"
                )
            data.tofile(file)
        file.write(bytes(-file.tell() % _ALIGNMENT))
