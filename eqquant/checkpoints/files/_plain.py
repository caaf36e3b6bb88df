"""Write plain safetensors files, without the manifest of eqquant."""

import pathlib

import numpy as np

from ._manifest import padded, place, with_length
from ._replacing import replacing
from ._safetensors import DTYPES, Tensor


def write_plain(
    path: pathlib.Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]
) -> None:
    """Write tensors and metadata to a safetensors file."""
    for name, array in tensors.items():
        if name == "__metadata__":
            raise ValueError(f"{path}: {name!r} is reserved and cannot name a tensor.")
        if array.dtype not in DTYPES.values():
            raise ValueError(
                f"{path}: {name!r} is {array.dtype}, not one of {', '.join(DTYPES)}."
            )
    planned = [Tensor(name, a.dtype, a.shape) for name, a in tensors.items()]
    entries, starts = place(planned)
    with replacing(path) as file:
        file.write(with_length(padded({"__metadata__": metadata, **entries})))
        for name in starts:
            raw = np.ascontiguousarray(tensors[name]).reshape(-1)
            file.write(raw.view(np.uint8).data)
