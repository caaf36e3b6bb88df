"""Write a checkpoint to one file or, above a size, to shards with an index.

One complete checkpoint exists at any time. Each save gives its shards new names, so
they never replace older shards. The index selects the current shards: renaming it
switches to the new checkpoint. A save to a single file switches by removing the index,
because an index takes precedence. Obsolete files are removed last.

If a tree is spread over processes, each process writes shards of its own part. The
first process writes the index after all shards are on the disk.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
import secrets
from collections.abc import Callable, Iterable, Sequence

from ..files import (
    index_of,
    KEY,
    PART,
    read_index,
    replacing,
    Shard,
    SUFFIX,
    sync_folder,
)
from ._leaf import Leaf
from ._processes import SingleProcess
from ._write import write_leaves


MAX_SHARD_SIZE = 5 * 10**9


def target_of(path: pathlib.Path, caller: str) -> pathlib.Path:
    """Return the file of a checkpoint. In a folder it is `model.safetensors`."""
    if path.name.endswith(SUFFIX):
        return path
    if path.suffix and not path.is_dir():
        raise ValueError(
            f"{caller}: path must end with {SUFFIX}, or be a folder; got {path}."
        )
    return path / f"model{SUFFIX}"


def write_checkpoint(
    path: pathlib.Path,
    leaves: Sequence[Leaf],
    metadata: dict[str, str],
    max_shard_size: int | None,
    *,
    saved: str | None = None,
    is_done: Callable[[pathlib.Path, Shard, Sequence[Leaf]], bool] = lambda *_: False,
    show: Callable[[Sequence[Leaf]], Iterable[Leaf]] = lambda leaves: leaves,
    processes: SingleProcess | None = None,
) -> None:
    """Write leaves to `path`, or to shards beside it.

    `saved` identifies the save, by default with a random token. `is_done` returns
    whether a finished shard already exists. `show` wraps leaves in a progress bar. Each
    process in `processes` writes shards of its own part.
    """
    processes = processes or SingleProcess()
    saved = processes.share_token(saved or secrets.token_hex(8))
    files = _files(path, leaves, max_shard_size, saved)
    is_first, index = processes.index == 0, index_of(path)

    def write() -> bool:
        path.parent.mkdir(parents=True, exist_ok=True)
        ours_before = index.is_file() and read_index(index)[0] is not None
        owned = [file for file in files if file.owner == processes.index]
        remaining = [
            f for f in owned if not (f.shard and is_done(f.path, f.shard, f.leaves))
        ]
        shown = iter(show([leaf for file in remaining for leaf in file.leaves]))
        for file in remaining:
            file_leaves = (next(shown) for _ in file.leaves)
            write_leaves(
                file.path, file.leaves, metadata, file.shard, shown=file_leaves
            )
        for _ in shown:
            pass  # The progress bar closes at its end.
        return ours_before

    def finish() -> None:
        if not is_first:
            return
        if files[0].shard is None:
            if ours_before:
                index.unlink()
                sync_folder(path.parent)
        else:
            _write_index(index, files, saved)
            path.unlink(missing_ok=True)
        _clean(path, {file.path.name for file in files})

    ours_before = processes.run_in_all(write)
    processes.run_in_all(finish)


@dataclasses.dataclass(frozen=True)
class _File:
    """A file to write, its leaves, and the process that writes it. `shard` is `None`
    for a single file."""

    path: pathlib.Path
    leaves: Sequence[Leaf]
    shard: Shard | None
    owner: int


def _files(
    path: pathlib.Path, leaves: Sequence[Leaf], max_size: int | None, saved: str
) -> list[_File]:
    owners = {part.owner for leaf in leaves for part in leaf.parts}
    groups = [
        (0, group) for group in _groups([leaf.owned_by(0) for leaf in leaves], max_size)
    ]
    for owner in sorted(owners - {0}):
        owned = [leaf.owned_by(owner) for leaf in leaves]
        owned = [leaf for leaf in owned if leaf.parts]
        groups += [(owner, group) for group in _groups(owned, max_size)]
    if len(groups) == 1:
        return [_File(path, groups[0][1], None, 0)]
    stem, count = path.name.removesuffix(SUFFIX), len(groups)
    return [
        _File(
            path.with_name(f"{stem}-{saved}-{i + 1:05}-of-{count:05}{SUFFIX}"),
            group,
            Shard(saved, i + 1, count),
            owner,
        )
        for i, (owner, group) in enumerate(groups)
    ]


def _groups(leaves: Sequence[Leaf], max_size: int | None) -> list[list[Leaf]]:
    """Group leaves in order, up to `max_size` bytes each. All parts of a leaf that one
    process owns are in the same shard."""
    groups: list[list[Leaf]] = [[]]
    size = 0
    for leaf in leaves:
        # Leaves without bytes, such as numbers, never start a shard.
        is_full = max_size is not None and size + leaf.nbytes > max_size
        if is_full and size and leaf.nbytes:
            groups.append([])
            size = 0
        groups[-1].append(leaf)
        size += leaf.nbytes
    return groups


def _write_index(index: pathlib.Path, files: Sequence[_File], saved: str) -> None:
    weight_map: dict[str, str] = {}
    for file in files:
        if not file.path.is_file():
            raise ValueError(
                f"{file.path}: process {file.owner} wrote this file, but process 0 "
                "cannot find it. All processes must write to one shared folder."
            )
        names = (part.name for leaf in file.leaves for part in leaf.parts)
        weight_map |= dict.fromkeys(names, file.path.name)
    total = sum(leaf.nbytes for file in files for leaf in file.leaves)
    contents = {"metadata": {"total_size": total, KEY: saved}, "weight_map": weight_map}
    with replacing(index) as file:
        file.write(json.dumps(contents, indent=2).encode())


def _clean(path: pathlib.Path, kept: set[str]) -> None:
    """Remove files of older saves of this checkpoint, including interrupted saves."""
    stem = re.escape(path.name.removesuffix(SUFFIX))
    shard = rf"{stem}-[0-9a-f]{{16}}-\d{{5}}-of-\d{{5}}{re.escape(SUFFIX)}"
    whole = rf"{stem}{re.escape(SUFFIX)}(\.index\.json)?"
    part = rf"\.({shard}|{whole})\.[0-9a-f]{{8}}{re.escape(PART)}"
    for file in path.parent.iterdir():
        is_obsolete = (
            re.fullmatch(rf"{shard}|{part}", file.name) and file.name not in kept
        )
        if is_obsolete:
            with contextlib.suppress(OSError):
                file.unlink()
