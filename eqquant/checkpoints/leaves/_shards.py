"""A checkpoint in one file or, above a size, in shards with an index.

At any time one whole checkpoint is in place. Shards have names of their own for each
save, so they never replace those of an older one; what counts is the index, and
renaming it is the step from old to new. From shards to one file that step is the
removal of the index: as long as it is there, it counts. What is no longer needed goes
last.

Of a tree that is spread over processes each writes shards of what it has. The first
process writes the index when all of these are on the disk.
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
from ._processes import Alone
from ._write import nbytes, write_leaves


MAX_SHARD_SIZE = 5 * 10**9


def target_of(path: pathlib.Path, caller: str) -> pathlib.Path:
    """Where a checkpoint goes: a folder holds it under the usual name."""
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
    processes: Alone | None = None,
) -> None:
    """The leaves as `path`, or as shards beside it.

    `saved` names the shards, by default like no others. `is_done` says whether one of
    them is there already. `show` shows progress. Each of several `processes` writes
    shards of what it has.
    """
    processes = processes or Alone()
    saved = processes.agree(saved or secrets.token_hex(8))
    files = _files(path, leaves, max_shard_size, saved)
    is_first, index = processes.index == 0, index_of(path)

    def write() -> bool:
        path.parent.mkdir(parents=True, exist_ok=True)
        ours_before = index.is_file() and read_index(index)[0] is not None
        mine = [file for file in files if file.owner == processes.index]
        left = [f for f in mine if not (f.shard and is_done(f.path, f.shard, f.leaves))]
        shown = iter(show([leaf for file in left for leaf in file.leaves]))
        for file in left:
            these = (next(shown) for _ in file.leaves)
            write_leaves(file.path, file.leaves, metadata, file.shard, shown=these)
        for _ in shown:
            pass  # A progress bar is closed at its end.
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

    ours_before = processes.together(write)
    processes.together(finish)


@dataclasses.dataclass(frozen=True)
class _File:
    """What goes into a file, and which process writes it. A file by itself is no
    shard."""

    path: pathlib.Path
    leaves: Sequence[Leaf]
    shard: Shard | None
    owner: int


def _files(
    path: pathlib.Path, leaves: Sequence[Leaf], most: int | None, saved: str
) -> list[_File]:
    owners = {part.owner for leaf in leaves for part in leaf.parts}
    groups = [(0, group) for group in _groups([leaf.of(0) for leaf in leaves], most)]
    for owner in sorted(owners - {0}):
        theirs = [leaf.of(owner) for leaf in leaves]
        theirs = [leaf for leaf in theirs if leaf.parts]
        groups += [(owner, group) for group in _groups(theirs, most)]
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


def _groups(leaves: Sequence[Leaf], most: int | None) -> list[list[Leaf]]:
    """In order. All that one process has of a leaf is in the same shard."""
    groups: list[list[Leaf]] = [[]]
    size = 0
    for leaf in leaves:
        # What has no bytes, such as a number, never is a shard by itself.
        full = most is not None and size + nbytes(leaf) > most
        if full and size and nbytes(leaf):
            groups.append([])
            size = 0
        groups[-1].append(leaf)
        size += nbytes(leaf)
    return groups


def _write_index(index: pathlib.Path, files: Sequence[_File], saved: str) -> None:
    weight_map: dict[str, str] = {}
    for file in files:
        if not file.path.is_file():
            raise ValueError(
                f"{file.path}: process {file.owner} wrote this file, but process 0 "
                "does not find it. All must write to one folder that they share."
            )
        names = (part.name for leaf in file.leaves for part in leaf.parts)
        weight_map |= dict.fromkeys(names, file.path.name)
    total = sum(nbytes(leaf) for file in files for leaf in file.leaves)
    about = {"metadata": {"total_size": total, KEY: saved}, "weight_map": weight_map}
    with replacing(index) as file:
        file.write(json.dumps(about, indent=2).encode())


def _clean(path: pathlib.Path, kept: set[str]) -> None:
    """Remove what older saves of this checkpoint, also such as were stopped, left."""
    stem = re.escape(path.name.removesuffix(SUFFIX))
    shard = rf"{stem}-[0-9a-f]{{16}}-\d{{5}}-of-\d{{5}}{re.escape(SUFFIX)}"
    whole = rf"{stem}{re.escape(SUFFIX)}(\.index\.json)?"
    part = rf"\.({shard}|{whole})\.[0-9a-f]{{8}}{re.escape(PART)}"
    for file in path.parent.iterdir():
        left = re.fullmatch(rf"{shard}|{part}", file.name) and file.name not in kept
        if left:
            with contextlib.suppress(OSError):
                file.unlink()
