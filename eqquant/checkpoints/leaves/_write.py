"""Write leaves to one file."""

import dataclasses
import pathlib
import zlib
from collections.abc import Iterable, Sequence
from typing import BinaryIO

import numpy as np

from ..files import CHUNK, make_header, Manifest, release, replacing, Shard
from ._leaf import Leaf


def write_leaves(
    path: pathlib.Path,
    leaves: Sequence[Leaf],
    metadata: dict[str, str],
    shard: Shard | None = None,
    *,
    shown: Iterable[Leaf] | None = None,
) -> None:
    """Write one file of leaves. Each part is made when it is written, and freed
    afterwards. `shown` iterates over the same leaves in a progress bar."""
    records = {k: v for leaf in leaves for k, v in leaf.records.items()}
    parts = [part for leaf in leaves for part in leaf.parts]
    pieces = {part.name: part.piece for part in parts if part.piece}
    manifest = Manifest(records, {}, shard, pieces)
    header, starts = make_header(parts, manifest, metadata)
    checksums: dict[str, int] = {}
    with replacing(path) as file:
        file.write(header)
        for leaf in leaves if shown is None else shown:
            for part in leaf.parts:
                file.seek(starts[part.name])
                checksums[part.name] = _write(file, part.make())
        manifest = dataclasses.replace(manifest, checksums=checksums)
        header, _ = make_header(parts, manifest, metadata)
        file.seek(0)
        file.write(header)


def _write(file: BinaryIO, array: np.ndarray) -> int:
    raw = array.reshape(-1).view(np.uint8).data
    crc = 0
    for start in range(0, len(raw), CHUNK):
        chunk = raw[start : start + CHUNK]
        crc = zlib.crc32(chunk, crc)
        file.write(chunk)
    release(array)
    return crc
