"""Write safetensors files one tensor at a time, without the manifest of eqquant."""

import contextlib
import glob
import os
import pathlib
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from ._json import parse_object, to_json
from ._manifest import padded, place, with_length
from ._mapped import release
from ._replacing import replacing
from ._safetensors import DTYPES, Tensor, TensorFile
from ._source import INDEX, SUFFIX


_shard_name = re.compile(rf"model-\d{{5}}-of-\d{{5}}{re.escape(SUFFIX)}")


def check_shard_size(size: int | None, caller: str) -> None:
    if size is not None and size < 1:
        raise ValueError(
            f"{caller}: max_shard_size must be a positive integer or None, got {size}."
        )


class ShardWriter(contextlib.AbstractContextManager):
    """Write `model.safetensors`, or several shards and their index, into a folder.

    [`ShardWriter.add`][] appends tensors to a temporary file, because the header of a
    safetensors file precedes the data. [`ShardWriter.finish`][] names the shards. So
    the largest tensor determines the peak memory. If the block ends before `finish`,
    the folder contains nothing new.

    With `key`, an interrupted block leaves its finished shards in a hidden folder,
    whose name is `hidden` and the key. The next writer with the same key compares their
    checksums and continues after them.

    **Fields:**

    - `notes`: the notes of the tensors in finished shards, by the name of the note.
    - `temporary`: a hidden folder, which is removed at the end.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        max_size: int | None,
        metadata: dict[str, str],
        key: str | None = None,
        hidden: str = ".unfinished-",
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._max_size, self._metadata = folder, max_size, metadata
        self.notes: dict[str, Any] = {}
        self._places: dict[str, int] = {}
        self._shards: list[pathlib.Path] = []
        self._is_kept, self._hidden = key is not None, hidden
        if key is None:
            self.temporary = pathlib.Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
        else:
            self.temporary = folder / f"{hidden}{key}"
            self.temporary.mkdir(exist_ok=True)
            self._adopt()
        self._start_shard()

    def __exit__(self, kind, *_):
        self._data.close()
        is_interrupted = kind is not None and self._shards
        if not (self._is_kept and is_interrupted):
            shutil.rmtree(self.temporary)
        if kind is None:
            for path in self.folder.glob(f"{glob.escape(self._hidden)}*"):
                shutil.rmtree(path)

    def _adopt(self) -> None:
        """Take over the finished shards of an interrupted writer."""
        while True:
            path = self.temporary / f"{len(self._shards)}{SUFFIX}"
            try:
                notes = parse_object(path.with_suffix(".json").read_bytes(), str(path))
                with TensorFile(path) as file:
                    file.checksums = notes["tensors"]
                    if file.checksums.keys() != file.tensors.keys():
                        break
                    for name in file.tensors:
                        release(file.view(name))
            except (OSError, ValueError, KeyError):  # It is absent or damaged.
                break
            self._places |= dict.fromkeys(notes["tensors"], len(self._shards))
            self.notes |= notes["notes"]
            self._shards.append(path)
        adopted = {path.stem for path in self._shards}
        for path in self.temporary.iterdir():
            if path.stem not in adopted:
                path.unlink()

    def _start_shard(self) -> None:
        self._data: BinaryIO = open(self.temporary / "data", "w+b")  # noqa: SIM115
        self._tensors: list[tuple[Tensor, int]] = []
        self._checksums: dict[str, int] = {}
        self._new_notes: dict[str, Any] = {}

    def add(self, tensors: Mapping[str, np.ndarray], note: str, value: Any = None):
        """Append tensors to one shard, and a note about them, which is a JSON value."""
        for name, array in tensors.items():
            if name == "__metadata__" or name in self._places:
                is_reserved = name == "__metadata__"
                kind = "is reserved" if is_reserved else "would name two tensors"
                raise ValueError(f"{self.folder}: {name!r} {kind}. Rename the array.")
            if array.dtype not in DTYPES.values():
                raise ValueError(
                    f"{self.folder}: {name!r} is {array.dtype}, not one of "
                    f"{', '.join(DTYPES)}."
                )
        used = self._data.tell()
        size = used + sum(array.nbytes for array in tensors.values())
        if self._max_size is not None and used and size > self._max_size:
            self._finish_shard()
            self._start_shard()
        for name, array in tensors.items():
            tensor = Tensor(name, array.dtype, array.shape)
            self._tensors.append((tensor, self._data.tell()))
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._data.write(raw.data)
            self._checksums[name] = zlib.crc32(raw.data) if self._is_kept else 0
            release(raw)
            self._places[name] = len(self._shards)
        self._new_notes[note] = value

    def _finish_shard(self) -> None:
        path = self.temporary / f"{len(self._shards)}{SUFFIX}"
        used = {tensor.name: start for tensor, start in self._tensors}
        entries, starts = place([tensor for tensor, _ in self._tensors])
        with replacing(path) as file:
            header = {"__metadata__": self._metadata, **entries}
            file.write(with_length(padded(header)))
            sizes = {tensor.name: tensor.nbytes for tensor, _ in self._tensors}
            for name in starts:
                self._data.seek(used[name])
                _copy(self._data, file, sizes[name])
        self._data.close()
        if self._is_kept:
            with replacing(path.with_suffix(".json")) as file:
                notes = {"tensors": self._checksums, "notes": self._new_notes}
                file.write(to_json(notes))
        self._shards.append(path)

    @contextlib.contextmanager
    def tensors(self) -> Iterator[Callable[[str], np.ndarray]]:
        """Yield a function that returns a tensor in the memory of its shard."""
        self._finish_last_shard()
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(TensorFile(path)) for path in self._shards]
            yield lambda name: files[self._places[name]].view(name)

    def _finish_last_shard(self) -> None:
        # If an interrupted writer finished all shards, no tensor follows them.
        if self._tensors or not self._shards:
            self._finish_shard()

    def finish(self) -> None:
        """Move the shards into place. The index, which makes several shards a
        checkpoint, is written last. Then shards of an earlier checkpoint are removed,
        because some libraries read all shards in a folder."""
        self._finish_last_shard()
        count = len(self._shards)
        names = [f"model-{i + 1:05}-of-{count:05}{SUFFIX}" for i in range(count)]
        if count == 1:
            names = [f"model{SUFFIX}"]
        for name, shard in zip(names, self._shards, strict=True):
            os.replace(shard, self.folder / name)
        index = self.folder / f"model{INDEX}"
        if count == 1:
            index.unlink(missing_ok=True)
        else:
            (self.folder / f"model{SUFFIX}").unlink(missing_ok=True)
            weight_map = {name: names[i] for name, i in self._places.items()}
            with replacing(index) as file:
                file.write(to_json({"metadata": {}, "weight_map": weight_map}))
        for path in list(self.folder.iterdir()):
            if _shard_name.fullmatch(path.name) and path.name not in names:
                path.unlink()


def _copy(source: BinaryIO, target: BinaryIO, nbytes: int) -> None:
    while nbytes:
        chunk = source.read(min(nbytes, 2**22))
        target.write(chunk)
        nbytes -= len(chunk)
