"""Safetensors as others write them: tensors, and no layout of eqquant's."""

import pathlib

import numpy as np

from ._layout import padded, place, Planned, with_length
from ._replacing import replacing
from ._safetensors import DTYPES


def write_plain(
    path: pathlib.Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]
) -> None:
    for name, array in tensors.items():
        if name == "__metadata__":
            raise ValueError(f"{path}: a tensor cannot be called {name!r}.")
        if array.dtype not in DTYPES.values():
            raise ValueError(f"{path}: safetensors have no {array.dtype}: {name!r}.")
    planned = [Planned(k, a.dtype, a.shape, a.nbytes) for k, a in tensors.items()]
    entries, starts = place(planned)
    with replacing(path) as file:
        file.write(with_length(padded({"__metadata__": metadata, **entries})))
        for name in starts:
            raw = np.ascontiguousarray(tensors[name]).reshape(-1)
            file.write(raw.view(np.uint8).data)
