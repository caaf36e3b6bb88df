"""Write GGUF files, version 3, for llama.cpp, tensor by tensor."""

import pathlib
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np


_ALIGNMENT = 32
_uint32, _int32, _float32, _bool, _string, _array = 4, 5, 6, 7, 8, 9
# A list is an array of strings, of floats, of bools, or of integers.
Value = int | float | str | list


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int  # The number of the type in ggml.
    nbytes: int
    data: Callable[[], np.ndarray]


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Value) -> tuple[int, bytes]:
    """Return the type and the bytes of a value."""
    if isinstance(value, list):
        kinds, raws = zip(*map(_value, value), strict=True)
        # llama.cpp expects int32 for the types of tokens.
        kind = _int32 if kinds[0] == _uint32 else kinds[0]
        return _array, struct.pack("<IQ", kind, len(value)) + b"".join(raws)
    if isinstance(value, str):
        return _string, _text(value)
    if isinstance(value, bool):
        return _bool, struct.pack("<?", value)
    if isinstance(value, float):
        return _float32, struct.pack("<f", value)
    return _uint32, struct.pack("<I", value)


def _pair(key: str, value: Value) -> bytes:
    kind, raw = _value(value)
    return _text(key) + struct.pack("<I", kind) + raw


def write(
    path: pathlib.Path,
    metadata: Mapping[str, Value],
    tensors: Iterable[Tensor],
) -> None:
    """Write a file. Calls `data()` of one tensor at a time, to limit memory."""
    tensors = list(tensors)
    header = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    header += [_pair(key, value) for key, value in metadata.items()]
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
