"""The manifest: the data that eqquant adds to the header of a safetensors file.

The manifest is two strings of the metadata. `eqquant` is JSON. It has the version, the
number of the shard, and the CRC-32 of each tensor. It also has a record of each leaf
that is more than a tensor, and the position of each piece of a larger tensor.
`eqquant.checksum` is the CRC-32 of the whole header, computed with zeros in place of
the checksum. So every changed bit of a file is detected, and a file is read in one
pass.
"""

import dataclasses
import re
import zlib
from collections.abc import Sequence
from typing import Any

from ._json import parse_object, to_json
from ._safetensors import are_sizes, DTYPES, Tensor, TensorFile


VERSION = 1
KEY, CHECKSUM = "eqquant", "eqquant.checksum"
_zeros = "0" * 8
_dtype_names = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Shard:
    """The number of a shard among the `count` files of one save, counted from 1.
    `saved` identifies the save."""

    saved: str
    number: int
    count: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """The position of a tensor in a larger tensor: the name `of` the larger tensor, its
    shape, and the start of the piece in it."""

    of: str
    shape: tuple[int, ...]
    start: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The parsed manifest of one file.

    **Fields:**

    - `records`: by the path of the leaf, or the path of one of its parts.
    - `checksums`: by the name of the tensor.
    - `shard`: `None` if the checkpoint is a single file.
    - `pieces`: by the name of the tensor. Whole tensors have no entry.
    """

    records: dict[str, Any]
    checksums: dict[str, int]
    shard: Shard | None = None
    pieces: dict[str, Piece] = dataclasses.field(default_factory=dict)


def place(planned: Sequence[Tensor]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the header entries of tensors, and the offset of each tensor from the end
    of the header.

    Tensors of whole lines of 64 bytes come first, so that JAX can use them in the
    memory of the file. Then tensors with the largest elements come first, which aligns
    all of them.
    """
    entries: dict[str, Any] = {}
    starts, position = {}, 0
    order = lambda tensor: (tensor.nbytes % 64 != 0, -tensor.dtype.itemsize)
    for tensor in sorted(planned, key=order):
        starts[tensor.name] = position
        position += tensor.nbytes
        entries[tensor.name] = {
            "dtype": _dtype_names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[tensor.name], position],
        }
    return entries, starts


def with_length(text: bytes) -> bytes:
    """Prepend the length of a header. `text` comes from [`padded`][]."""
    return len(text).to_bytes(8, "little") + text


def padded(header: dict[str, Any]) -> bytes:
    """Write a header as JSON, padded with spaces. With its length in front, it takes a
    multiple of 64 bytes."""
    text = to_json(header)
    return text + b" " * (-(len(text) + 8) % 64)


def make_header(
    planned: Sequence[Tensor],
    manifest: Manifest,
    metadata: dict[str, str],
) -> tuple[bytes, dict[str, int]]:
    """Return the header with its length in front, and the position of each tensor in
    the file.

    The length does not depend on the checksums. So a writer can reserve the space first
    and write the checksums at the end.
    """
    entries, starts = place(planned)
    described: dict[str, Any] = {
        "version": VERSION,
        "records": manifest.records,
        "checksums": {
            name: f"{manifest.checksums.get(name, 0):08x}" for name in entries
        },
    }
    if manifest.shard is not None:
        described["shard"] = dataclasses.asdict(manifest.shard)
    if manifest.pieces:
        described["pieces"] = {
            name: dataclasses.asdict(piece) for name, piece in manifest.pieces.items()
        }
    strings = {**metadata, KEY: to_json(described).decode(), CHECKSUM: _zeros}
    text = padded({"__metadata__": strings, **entries})
    crc = zlib.crc32(text)
    text = text.replace(_entry(_zeros), _entry(f"{crc:08x}"))
    whole = with_length(text)
    return whole, {name: len(whole) + start for name, start in starts.items()}


def _entry(checksum: str) -> bytes:
    # A JSON string contains no bare quotes, so this only matches the key.
    return f'"{CHECKSUM}":"{checksum}"'.encode()


def read_manifest(file: TensorFile) -> Manifest | None:
    """Return the manifest of a file, or `None` if eqquant did not write the file."""
    ours = [key for key in file.metadata if key.startswith(KEY)]
    if not ours:
        return None
    where = str(file.path)
    checksum = file.metadata.get(CHECKSUM, "")
    blank = file.header.replace(_entry(checksum), _entry(_zeros))
    if (
        set(ours) != {KEY, CHECKSUM}
        or file.header.count(_entry(checksum)) != 1
        or not re.fullmatch("[0-9a-f]{8}", checksum)
        or zlib.crc32(blank) != int(checksum, 16)
    ):
        raise ValueError(
            f"{where}: {CHECKSUM} does not match the header: the file is damaged, or "
            "another program rewrote it. Save it again with eqquant."
        )
    parsed = parse_object(file.metadata[KEY].encode(), f"{where}: the manifest")
    version = parsed.get("version")
    if version != VERSION or type(version) is not int:
        raise ValueError(
            f"{where}: version of the manifest is {version!r}; this version of eqquant "
            f"reads version {VERSION}."
        )
    expected = {"version", "records", "checksums"}
    if parsed.keys() - {"shard", "pieces"} != expected:
        raise ValueError(
            f"{where}: the manifest must have the keys {sorted(expected)}, got "
            f"{sorted(parsed)}."
        )
    return Manifest(
        _records(parsed["records"], where),
        _checksums(parsed["checksums"], file),
        _shard(parsed.get("shard"), where),
        _pieces(parsed.get("pieces", {}), file),
    )


def _records(records: Any, where: str) -> dict[str, Any]:
    if not isinstance(records, dict) or not all(
        isinstance(record, dict) and isinstance(record.get("is"), str)
        for record in records.values()
    ):
        raise ValueError(f"{where}: records must be objects with a string 'is'.")
    return records


def _checksums(checksums: Any, file: TensorFile) -> dict[str, int]:
    if not isinstance(checksums, dict) or checksums.keys() != file.tensors.keys():
        raise ValueError(
            f"{file.path}: checksums must have exactly one entry for each tensor."
        )
    for name, value in checksums.items():
        if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{8}", value):
            raise ValueError(
                f"{file.path}: checksums: {name!r} must have 8 hexadecimal digits, got "
                f"{value!r}."
            )
    return {name: int(value, 16) for name, value in checksums.items()}


def _shard(shard: Any, where: str) -> Shard | None:
    if shard is None:
        return None
    fields = {"saved": str, "number": int, "count": int}
    if (
        not isinstance(shard, dict)
        or shard.keys() != fields.keys()
        or any(type(shard[name]) is not kind for name, kind in fields.items())
        or not 1 <= shard["number"] <= shard["count"]
    ):
        raise ValueError(
            f"{where}: shard must have the keys saved, number and count, with a number "
            f"from 1 to count; got {shard!r}."
        )
    return Shard(**shard)


def _pieces(pieces: Any, file: TensorFile) -> dict[str, Piece]:
    if not isinstance(pieces, dict) or not pieces.keys() <= file.tensors.keys():
        raise ValueError(
            f"{file.path}: pieces must have the names of tensors in this file."
        )
    return {name: _piece(name, piece, file) for name, piece in pieces.items()}


def _piece(name: str, piece: Any, file: TensorFile) -> Piece:
    stored_shape = file.tensors[name].shape
    if (
        not isinstance(piece, dict)
        or piece.keys() != {"of", "shape", "start"}
        or not isinstance(piece["of"], str)
        or not are_sizes(piece["shape"])
        or not are_sizes(piece["start"])
        or not stored_shape
        or not len(piece["shape"]) == len(piece["start"]) == len(stored_shape)
        or any(
            start + part > size or not part
            for start, part, size in zip(
                piece["start"], stored_shape, piece["shape"], strict=True
            )
        )
    ):
        raise ValueError(
            f"{file.path}: pieces: {name!r} has the shape {stored_shape}, which does "
            f"not fit the piece {piece!r}."
        )
    return Piece(piece["of"], tuple(piece["shape"]), tuple(piece["start"]))
