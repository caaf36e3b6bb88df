"""An open checkpoint: one file, or an index and its shards."""

import contextlib
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._json import parse_object
from ._manifest import KEY, Manifest, read_manifest
from ._memory import convert, empty
from ._safetensors import MAX_HEADER, Path, Slices, Tensor, TensorFile
from ._split import assemble, Placed, SplitTensor


SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"


class Source(contextlib.AbstractContextManager):
    """The tensors of a checkpoint in one or more open files.

    **Fields:**

    - `path`: the file or the index.
    - `files`: all open files.
    - `tensors`: the tensors by name.
    - `records`: the records of leaves that are more than a tensor, if eqquant wrote
        them.
    - `is_ours`: whether eqquant wrote all files, so that every tensor has a checksum.
    - `metadata`: the strings that were saved with the tensors.
    """

    path: pathlib.Path
    files: list[TensorFile]
    tensors: dict[str, Tensor]
    records: dict[str, Any]
    is_ours: bool
    metadata: dict[str, str]

    def __init__(self, path: Path):
        self.path = find(path)
        self.files, self.is_ours = [], True
        self.tensors, self.records, self.metadata = {}, {}, {}
        self._file_of: dict[str, TensorFile] = {}
        self._pieces: dict[str, list[Placed]] = {}
        self._open = contextlib.ExitStack()
        with self._open:
            if self.path.name.endswith(".json"):
                self._add_shards()
            else:
                manifest = self._add(self.path)
                if manifest is not None and manifest.shard is not None:
                    shard = manifest.shard
                    raise ValueError(
                        f"{self.path}: the file is shard {shard.number} of "
                        f"{shard.count}. Pass the index, *{INDEX}, or the folder."
                    )
            self._assemble()
            self._open = self._open.pop_all()

    def __exit__(self, *_):
        self._open.close()

    def read(self, name: str, dtype: Any = None) -> np.ndarray:
        """Read a tensor into new memory, and check its checksum if there is one."""
        tensor = self.tensors[name]
        if not isinstance(tensor, SplitTensor):
            return self._file_of[name].read(name, dtype)
        (whole,) = self.read_slices(name, [tuple(slice(0, n) for n in tensor.shape)])
        if dtype is None or whole.dtype == dtype:
            return whole
        out = empty(whole.shape, dtype)
        convert(whole, out, f"{self.path}: {name!r}")
        return out

    def view(self, name: str) -> np.ndarray:
        """Return a tensor like `read`, if possible in the memory of its file. Pass it
        to [`kept`][], or to [`release`][] after use."""
        is_split = isinstance(self.tensors[name], SplitTensor)
        return self.read(name) if is_split else self._file_of[name].view(name)

    def read_slices(self, name: str, places: Sequence[Slices]) -> list[np.ndarray]:
        """Read slices of a tensor. Bytes outside of the slices stay unread if the
        tensor has no checksum, or lie in another piece."""
        tensor = self.tensors[name]
        shapes = [tuple(s.stop - s.start for s in place) for place in places]
        out = [empty(shape, tensor.dtype) for shape in shapes]
        slices = list(zip(places, out, strict=True))
        if isinstance(tensor, SplitTensor):
            tensor.read_slices(slices)
        else:
            self._file_of[name].read_slices(name, slices)
        return out

    def config(self) -> dict[str, Any] | None:
        """Return the contents of the `config.json` beside the checkpoint, or `None` if
        there is no such file."""
        path = self.path.parent / "config.json"
        if not path.is_file() or path.stat().st_size > MAX_HEADER:
            return None
        return parse_object(path.read_bytes(), str(path))

    def _add(self, path: pathlib.Path) -> Manifest | None:
        file = self._open.enter_context(TensorFile(path))
        manifest = read_manifest(file)
        self.files.append(file)
        for name, stored in file.tensors.items():
            if name in self.tensors:
                raise ValueError(
                    f"{path}: {name!r} is also in {self._file_of[name].path.name}."
                )
            self.tensors[name] = stored
            self._file_of[name] = file
        if manifest is not None:
            if duplicates := self.records.keys() & manifest.records.keys():
                raise ValueError(
                    f"{path}: records: {min(duplicates)!r} is also in another shard."
                )
            self.records.update(manifest.records)
            file.checksums = manifest.checksums
            for name, piece in manifest.pieces.items():
                self._pieces.setdefault(piece.of, []).append(Placed(file, name, piece))
        self.is_ours &= manifest is not None
        ours = {key for key in file.metadata if key.startswith(KEY)}
        self.metadata |= {k: v for k, v in file.metadata.items() if k not in ours}
        return manifest

    def _add_shards(self) -> None:
        saved, weight_map = read_index(self.path)
        names = sorted(set(weight_map.values()))
        shard_numbers = []
        for name in names:
            manifest = self._add(self.path.parent / name)
            shard = None if manifest is None else manifest.shard
            if (None if shard is None else shard.saved) != saved:
                raise ValueError(
                    f"{self.path}: {name} does not belong to this index: another call "
                    "saved it."
                )
            if shard is not None:
                shard_numbers.append((shard.number, shard.count))
        if saved is not None and sorted(shard_numbers) != [
            (i + 1, len(names)) for i in range(len(names))
        ]:
            raise ValueError(
                f"{self.path}: expected shards 1 to {len(names)}, found "
                f"{sorted(number for number, _ in shard_numbers)}."
            )
        file_names = {name: file.path.name for name, file in self._file_of.items()}
        if file_names != weight_map:
            wrong = {*file_names.items()} ^ {*weight_map.items()}
            raise ValueError(
                f"{self.path}: weight_map does not match the tensors in the shards: "
                f"{sorted({name for name, _ in wrong})[:5]}."
            )

    def _assemble(self) -> None:
        """Replace the pieces of split tensors by the whole tensors."""
        for placed in itertools.chain.from_iterable(self._pieces.values()):
            del self.tensors[placed.name]
        for name, pieces in self._pieces.items():
            if name in self.tensors:
                raise ValueError(
                    f"{self.path}: {name!r} is stored both whole and in pieces."
                )
            self.tensors[name] = assemble(name, pieces)


class MemorySource(Source):
    """Arrays in memory and a `config.json`, with the interface of a [`Source`][]."""

    def __init__(self, arrays: dict[str, np.ndarray], config: dict[str, Any]):
        self.path, self.files = pathlib.Path("memory"), []
        self.records, self.metadata, self.is_ours = {}, {}, False
        self.tensors = {k: Tensor(k, a.dtype, a.shape) for k, a in arrays.items()}
        self._arrays, self._config = arrays, config
        self._open = contextlib.ExitStack()

    def read(self, name, dtype=None):
        array = self._arrays[name]
        return array if dtype is None else array.astype(dtype)

    def view(self, name):
        return self.read(name)

    def config(self):
        return self._config


def find(path: Path) -> pathlib.Path:
    """Return the file or the index for a path or a folder."""
    path = pathlib.Path(path)
    if path.is_dir():
        index, single = path / f"model{INDEX}", path / f"model{SUFFIX}"
        if index.exists() or single.exists():
            return _single_or_index(single, index)
        found = sorted(path.glob(f"*{INDEX}")) or sorted(path.glob(f"*{SUFFIX}"))
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise ValueError(
                f"{path}: expected model{SUFFIX}, model{INDEX}, or exactly one other "
                f"such file; found {names}."
            )
        return found[0]
    if path.name.endswith(SUFFIX):
        path = _single_or_index(path, index_of(path))
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file or folder.")
    return path


def index_of(path: pathlib.Path) -> pathlib.Path:
    """Return the path of the index beside a file."""
    return path.with_name(path.name.removesuffix(SUFFIX) + INDEX)


def _single_or_index(single: pathlib.Path, index: pathlib.Path) -> pathlib.Path:
    """Choose between a single file and an index. Both exist if a save was stopped
    between two steps. An index of eqquant then wins. Otherwise the single file wins, as
    in other libraries."""
    if not index.is_file():
        return single
    if not single.is_file():
        return index
    return single if read_index(index)[0] is None else index


def read_index(path: pathlib.Path) -> tuple[str | None, dict[str, str]]:
    """Return the identifier of the save (`None` if eqquant did not write the index),
    and the file name of each tensor."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file.")
    if path.stat().st_size > MAX_HEADER:
        raise ValueError(f"{path}: an index must have at most {MAX_HEADER} bytes.")
    parsed = parse_object(path.read_bytes(), f"{path}: the index")
    weight_map, metadata = parsed.get("weight_map"), parsed.get("metadata", {})
    if not isinstance(weight_map, dict) or not isinstance(metadata, dict):
        raise ValueError(
            f"{path}: weight_map and metadata of an index must be objects."
        )
    for name, file in weight_map.items():
        is_name = isinstance(file, str) and file.endswith(SUFFIX)
        if not is_name or set(file) & set("/\\:\0") or file.startswith("."):
            raise ValueError(
                f"{path}: weight_map: {name!r} must name a *{SUFFIX} file beside the "
                f"index, got {file!r}."
            )
    saved = metadata.get(KEY)
    if KEY in metadata and not isinstance(saved, str):
        raise ValueError(f"{path}: {KEY} must be a string, got {saved!r}.")
    return saved, weight_map
