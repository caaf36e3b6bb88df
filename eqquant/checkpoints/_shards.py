"""A checkpoint in one file or, above a size, in shards with an index.

At any time one whole checkpoint is in place. Shards have names of their own for each
save, so they never replace those of an older one; what counts is the index, and
renaming it is the step from old to new. From shards to one file that step is the
removal of the index: as long as it is there, it counts. What is no longer needed goes
last.
"""

import contextlib
import json
import pathlib
import re
import secrets
from collections.abc import Callable, Iterable, Sequence

from ._layout import KEY, Shard
from ._records import Leaf
from ._source import index_of, read_index, SUFFIX
from ._write import nbytes, PART, replacing, sync_folder, write_leaves


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
) -> None:
    """The leaves as `path`, or as shards beside it.

    `saved` names the shards, by default like no others. `is_done` says whether one of
    them is there already. `show` shows progress.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    index = index_of(path)
    ours_before = index.is_file() and read_index(index)[0] is not None
    groups = _groups(leaves, max_shard_size)
    if len(groups) == 1:
        write_leaves(path, leaves, metadata, shown=show(leaves))
        if ours_before:
            index.unlink()
            sync_folder(path.parent)
        kept = set()
    else:
        kept = _write_shards(path, groups, metadata, saved, is_done, show)
        path.unlink(missing_ok=True)
    _clean(path, kept)


def _groups(leaves: Sequence[Leaf], most: int | None) -> list[list[Leaf]]:
    """In order. All parts of a leaf are in the same shard."""
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


def _write_shards(path, groups, metadata, saved, is_done, show) -> set[str]:
    saved = saved or secrets.token_hex(8)
    stem, count = path.name.removesuffix(SUFFIX), len(groups)
    weight_map: dict[str, str] = {}
    left = []
    for i, leaves in enumerate(groups):
        name = f"{stem}-{saved}-{i + 1:05}-of-{count:05}{SUFFIX}"
        weight_map |= {part.name: name for leaf in leaves for part in leaf.parts}
        shard = Shard(saved, i + 1, count)
        if not is_done(path.with_name(name), shard, leaves):
            left.append((path.with_name(name), leaves, shard))
    shown = iter(show([leaf for _, leaves, _ in left for leaf in leaves]))
    for place, leaves, shard in left:
        these = (next(shown) for _ in leaves)
        write_leaves(place, leaves, metadata, shard, shown=these)
    total = sum(nbytes(leaf) for leaves in groups for leaf in leaves)
    about = {"metadata": {"total_size": total, KEY: saved}, "weight_map": weight_map}
    with replacing(index_of(path)) as file:
        file.write(json.dumps(about, indent=2).encode())
    for _ in shown:
        pass  # A progress bar is closed at its end.
    return set(weight_map.values())


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
