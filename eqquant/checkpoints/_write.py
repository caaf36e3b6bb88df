"""Files that are whole at any time: written beside their place, synced, and renamed."""

import contextlib
import dataclasses
import os
import pathlib
import secrets
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

import numpy as np

from ._layout import Layout, make_header, Planned, Shard
from ._records import Leaf
from ._safetensors import CHUNK


PART = ".part"


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` at the end, and not before all
    of it is on the disk. If that fails `path` is what it was."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        with open(part, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: pathlib.Path) -> None:
    """Names in a folder are data of the folder, and synced with it."""
    if os.name == "nt":
        return  # Folders cannot be opened there.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def nbytes(leaf: Leaf) -> int:
    return sum(part.nbytes for part in leaf.parts)


def write_leaves(
    path: pathlib.Path,
    leaves: Sequence[Leaf],
    metadata: dict[str, str],
    shard: Shard | None = None,
    *,
    shown: Iterable[Leaf] | None = None,
) -> None:
    """One file of these leaves. Each is made when it is written, and then forgotten.
    `shown` are the same leaves, in a progress bar."""
    records = {k: v for leaf in leaves for k, v in leaf.records.items()}
    planned = [
        Planned(part.name, part.dtype, part.shape, part.nbytes)
        for leaf in leaves
        for part in leaf.parts
    ]
    pieces = {
        part.name: part.piece for leaf in leaves for part in leaf.parts if part.piece
    }
    layout = Layout(records, {}, shard, pieces)
    header, starts = make_header(planned, layout, metadata)
    checksums: dict[str, int] = {}
    with replacing(path) as file:
        file.write(header)
        for leaf in leaves if shown is None else shown:
            for part in leaf.parts:
                file.seek(starts[part.name])
                checksums[part.name] = _write(file, part.make())
        layout = dataclasses.replace(layout, checksums=checksums)
        header, _ = make_header(planned, layout, metadata)
        file.seek(0)
        file.write(header)


def _write(file: BinaryIO, array: np.ndarray) -> int:
    raw = array.reshape(-1).view(np.uint8).data
    crc = 0
    for start in range(0, len(raw), CHUNK):
        piece = raw[start : start + CHUNK]
        crc = zlib.crc32(piece, crc)
        file.write(piece)
    return crc
