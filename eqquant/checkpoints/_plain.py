"""Safetensors as others write them: tensors, and no layout of eqquant's."""

import pathlib

import numpy as np

from ._json import to_json
from ._safetensors import DTYPES
from ._write import replacing


_of_dtype = {dtype: name for name, dtype in DTYPES.items()}


def write_plain(
    path: pathlib.Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]
) -> None:
    header: dict = {"__metadata__": metadata}
    for name, array in tensors.items():
        if name in header:
            raise ValueError(f"{path}: a tensor cannot be called {name!r}.")
        if array.dtype not in _of_dtype:
            raise ValueError(f"{path}: safetensors have no {array.dtype}: {name!r}.")
    # Each begins at a multiple of the size of its numbers.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    position = 0
    for name, array in ordered:
        header[name] = {
            "dtype": _of_dtype[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        position += array.nbytes
    text = to_json(header)
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in ordered:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
