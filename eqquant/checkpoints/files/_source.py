"""A checkpoint that is read: one file, or an index and its shards."""

import contextlib
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._json import parse_object
from ._layout import KEY, Layout, read_layout
from ._memory import convert, empty
from ._safetensors import MAX_HEADER, Path, Slices, Tensor, TensorFile
from ._split import assemble, Placed, SplitTensor


SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"


class Source:
    """The tensors of a checkpoint, in one file or in several, which are open.

    **Fields:**

    - `path`: what was asked for.
    - `files`: all of them.
    - `tensors`: by name.
    - `records`: of leaves that are more than a tensor, in files of eqquant's.
    - `is_ours`: whether eqquant wrote all of them, so that there are checksums.
    - `metadata`: the strings that came with them.
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
        self._checksums: dict[str, int] = {}
        self._pieces: dict[str, list[Placed]] = {}
        self._open = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            if self.path.name.endswith(".json"):
                self._add_shards()
            else:
                layout = self._add(self.path)
                if layout is not None and layout.shard is not None:
                    shard = layout.shard
                    raise ValueError(
                        f"{self.path}: this is shard {shard.number} of "
                        f"{shard.count}. Give the index, *{INDEX}, or the folder."
                    )
            self._assemble()
            stack.pop_all()

    def close(self) -> None:
        self._open.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def read(self, name: str, dtype: Any = None) -> np.ndarray:
        """A tensor, in memory of its own, its checksum checked if it has one."""
        tensor = self.tensors[name]
        if not isinstance(tensor, SplitTensor):
            return self._file_of[name].read(name, dtype, self._checksums.get(name))
        (whole,) = self.read_slices(name, [tuple(slice(0, n) for n in tensor.shape)])
        if dtype is None or whole.dtype == dtype:
            return whole
        out = empty(whole.shape, dtype)
        convert(whole, out, f"{self.path}: {name!r}")
        return out

    def read_slices(self, name: str, places: Sequence[Slices]) -> list[np.ndarray]:
        """Slices of a tensor. What they do not need stays unread if it has no
        checksum, or is a piece by itself."""
        tensor = self.tensors[name]
        shapes = [tuple(s.stop - s.start for s in place) for place in places]
        out = [empty(shape, tensor.dtype) for shape in shapes]
        slices = list(zip(places, out, strict=True))
        if isinstance(tensor, SplitTensor):
            tensor.read_slices(slices)
        else:
            checksum = self._checksums.get(name)
            self._file_of[name].read_slices(name, slices, checksum)
        return out

    def _add(self, path: pathlib.Path) -> Layout | None:
        file = self._open.enter_context(TensorFile(path))
        layout = read_layout(file)
        self.files.append(file)
        for name, stored in file.tensors.items():
            if name in self.tensors:
                raise ValueError(
                    f"{path}: {name!r} is in {self._file_of[name].path.name} as well."
                )
            self.tensors[name] = stored
            self._file_of[name] = file
        if layout is not None:
            if twice := self.records.keys() & layout.records.keys():
                raise ValueError(f"{path}: {min(twice)!r} is in two shards.")
            self.records.update(layout.records)
            self._checksums.update(layout.checksums)
            for name, piece in layout.pieces.items():
                checksum = layout.checksums[name]
                placed = Placed(file, name, checksum, piece)
                self._pieces.setdefault(piece.of, []).append(placed)
        self.is_ours &= layout is not None
        ours = {key for key in file.metadata if key.startswith(KEY)}
        self.metadata |= {k: v for k, v in file.metadata.items() if k not in ours}
        return layout

    def _add_shards(self) -> None:
        saved, weight_map = read_index(self.path)
        names = sorted(set(weight_map.values()))
        seen = []
        for name in names:
            layout = self._add(self.path.parent / name)
            shard = None if layout is None else layout.shard
            if (None if shard is None else shard.saved) != saved:
                raise ValueError(
                    f"{self.path}: {name} was not saved together with this index."
                )
            if shard is not None:
                seen.append((shard.number, shard.count))
        if saved is not None and sorted(seen) != [
            (i + 1, len(names)) for i in range(len(names))
        ]:
            raise ValueError(f"{self.path}: some of the shards are missing.")
        held = {name: file.path.name for name, file in self._file_of.items()}
        if held != weight_map:
            wrong = {*held.items()} ^ {*weight_map.items()}
            raise ValueError(
                f"{self.path}: the shards do not hold what the index says: "
                f"{sorted({name for name, _ in wrong})[:5]}."
            )

    def _assemble(self) -> None:
        """In place of pieces the tensors that they make."""
        for placed in itertools.chain.from_iterable(self._pieces.values()):
            del self.tensors[placed.name]
        for name, pieces in self._pieces.items():
            if name in self.tensors:
                raise ValueError(f"{self.path}: {name!r} is there whole and in pieces.")
            self.tensors[name] = assemble(name, pieces)


def find(path: Path) -> pathlib.Path:
    """The file, or the index, that a path or a folder stands for."""
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
        raise FileNotFoundError(f"{path}: there is no such file or folder.")
    return path


def index_of(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name.removesuffix(SUFFIX) + INDEX)


def _single_or_index(single: pathlib.Path, index: pathlib.Path) -> pathlib.Path:
    """Both are there when a save was stopped between two steps: an index of eqquant's
    then counts. Elsewhere the single file does, as it does for others."""
    if not index.is_file():
        return single
    if not single.is_file():
        return index
    return single if read_index(index)[0] is None else index


def read_index(path: pathlib.Path) -> tuple[str | None, dict[str, str]]:
    """By whom the shards were saved (None: not by eqquant), and where tensors are."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file.")
    if path.stat().st_size > MAX_HEADER:
        raise ValueError(f"{path}: too long for an index.")
    parsed = parse_object(path.read_bytes(), f"{path}: the index")
    weight_map, about = parsed.get("weight_map"), parsed.get("metadata", {})
    if not isinstance(weight_map, dict) or not isinstance(about, dict):
        raise ValueError(f"{path}: the index must have a weight_map.")
    for name, file in weight_map.items():
        is_name = isinstance(file, str) and file.endswith(SUFFIX)
        if not is_name or set(file) & set("/\\:\0") or file.startswith("."):
            raise ValueError(
                f"{path}: {name!r} is said to be in {file!r}, which is not the name of "
                f"a *{SUFFIX} file beside the index."
            )
    saved = about.get(KEY)
    if KEY in about and not isinstance(saved, str):
        raise ValueError(f"{path}: {KEY} must be a string.")
    return saved, weight_map
