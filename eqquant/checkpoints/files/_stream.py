"""Write safetensors files one tensor at a time, without the manifest of eqquant."""

import contextlib
import os
import pathlib
import tempfile
from typing import BinaryIO

import numpy as np

from ._json import to_json
from ._manifest import padded, place, with_length
from ._replacing import replacing
from ._safetensors import DTYPES, Tensor
from ._source import INDEX, SUFFIX


class ShardWriter(contextlib.AbstractContextManager):
    """Write `model.safetensors`, or several shards and their index, into a folder.

    [`ShardWriter.add`][] appends a tensor to a temporary file, because the header of a
    safetensors file precedes the data. [`ShardWriter.finish`][] names the shards. So
    the largest tensor determines the peak memory. If the block ends before `finish`,
    the folder contains nothing new.
    """

    def __init__(
        self, folder: pathlib.Path, max_size: int | None, metadata: dict[str, str]
    ):
        self.folder, self._max_size, self._metadata = folder, max_size, metadata
        self._places: dict[str, int] = {}
        self._shards: list[pathlib.Path] = []
        self._open = contextlib.ExitStack()
        self._temporary = pathlib.Path(
            self._open.enter_context(
                tempfile.TemporaryDirectory(prefix=".part-", dir=folder)
            )
        )
        self._start_shard()

    def __exit__(self, *_):
        self._data.close()
        self._open.close()

    def _start_shard(self) -> None:
        self._data: BinaryIO = open(self._temporary / "data", "w+b")  # noqa: SIM115
        self._tensors: list[tuple[Tensor, int]] = []

    def add(self, name: str, array: np.ndarray) -> None:
        if name == "__metadata__" or name in self._places:
            kind = "is reserved" if name == "__metadata__" else "would name two tensors"
            raise ValueError(f"{self.folder}: {name!r} {kind}. Rename the array.")
        if array.dtype not in DTYPES.values():
            raise ValueError(
                f"{self.folder}: {name!r} is {array.dtype}, not one of "
                f"{', '.join(DTYPES)}."
            )
        used = self._data.tell()
        if self._max_size is not None and used and used + array.nbytes > self._max_size:
            self._finish_shard()
            self._start_shard()
            used = 0
        self._tensors.append((Tensor(name, array.dtype, array.shape), used))
        raw = np.ascontiguousarray(array).reshape(-1)
        self._data.write(raw.view(np.uint8).data)
        self._places[name] = len(self._shards)

    def _finish_shard(self) -> None:
        path = self._temporary / f"{len(self._shards)}{SUFFIX}"
        used = dict((tensor.name, start) for tensor, start in self._tensors)
        entries, starts = place([tensor for tensor, _ in self._tensors])
        with open(path, "xb") as file:
            header = {"__metadata__": self._metadata, **entries}
            file.write(with_length(padded(header)))
            sizes = {tensor.name: tensor.nbytes for tensor, _ in self._tensors}
            for name in starts:
                self._data.seek(used[name])
                _copy(self._data, file, sizes[name])
            file.flush()
            os.fsync(file.fileno())
        self._data.close()
        self._shards.append(path)

    def finish(self) -> None:
        """Move the shards into place. The index, which makes several shards a
        checkpoint, is written last."""
        self._finish_shard()
        count = len(self._shards)
        names = [f"model-{i + 1:05}-of-{count:05}{SUFFIX}" for i in range(count)]
        if count == 1:
            names = [f"model{SUFFIX}"]
        for name, shard in zip(names, self._shards, strict=True):
            os.replace(shard, self.folder / name)
        index = self.folder / f"model{INDEX}"
        if count == 1:
            index.unlink(missing_ok=True)
            return
        (self.folder / f"model{SUFFIX}").unlink(missing_ok=True)
        weight_map = {name: names[i] for name, i in self._places.items()}
        with replacing(index) as file:
            file.write(to_json({"metadata": {}, "weight_map": weight_map}))


def _copy(source: BinaryIO, target: BinaryIO, nbytes: int) -> None:
    while nbytes:
        chunk = source.read(min(nbytes, 2**22))
        target.write(chunk)
        nbytes -= len(chunk)
