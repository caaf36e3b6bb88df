"""What eqquant writes in the header of a file, beside the tensors: the layout.

It is two strings of the metadata. `eqquant` is JSON: the version, a record of each leaf
that is more than a tensor, a CRC-32 of the bytes of each tensor, which shard this is,
and which tensors are pieces of a larger one. `eqquant.checksum` is the CRC-32 of the
whole header, itself taken as zeros. So no bit of a file can change unseen, and reading
costs one pass.
"""

import dataclasses
import re
import zlib
from typing import Any

from ._json import parse_object, to_json
from ._safetensors import are_sizes, DTYPES, TensorFile


VERSION = 1
KEY, CHECKSUM = "eqquant", "eqquant.checksum"
_zeros = "0" * 8
_of_dtype = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Shard:
    """Which one of `count` files, counted from 1, that were `saved` together."""

    saved: str
    number: int
    count: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """Where in a larger tensor, `of` a name and a shape, this one starts."""

    of: str
    shape: tuple[int, ...]
    start: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """**Fields:**

    - `records`: by the path of the leaf, or of a part of it.
    - `checksums`: by the name of the tensor.
    - `shard`: None for a file by itself.
    - `pieces`: by the name of the tensor; without those that are whole.
    """

    records: dict[str, Any]
    checksums: dict[str, int]
    shard: Shard | None = None
    pieces: dict[str, Piece] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Planned:
    """A tensor that will be in a file."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    nbytes: int


def place(planned: list[Planned]) -> tuple[dict[str, Any], dict[str, int]]:
    """What a header says of tensors, and where each starts after the header: aligned,
    as those of the longest elements come first."""
    entries: dict[str, Any] = {}
    starts, position = {}, 0
    for tensor in sorted(planned, key=lambda t: -t.dtype.itemsize):
        starts[tensor.name] = position
        position += tensor.nbytes
        entries[tensor.name] = {
            "dtype": _of_dtype[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[tensor.name], position],
        }
    return entries, starts


def with_length(text: bytes) -> bytes:
    """A header as it is in a file, after text that was padded by [`padded`][]."""
    return len(text).to_bytes(8, "little") + text


def padded(header: dict[str, Any]) -> bytes:
    text = to_json(header)
    return text + b" " * (-len(text) % 8)


def make_header(
    planned: list[Planned],
    layout: Layout,
    metadata: dict[str, str],
) -> tuple[bytes, dict[str, int]]:
    """The header, with its length before it, and where each tensor starts in the file.

    The length does not depend on the checksums, so it may be written twice.
    """
    entries, starts = place(planned)
    described: dict[str, Any] = {
        "version": VERSION,
        "records": layout.records,
        "checksums": {name: f"{layout.checksums.get(name, 0):08x}" for name in entries},
    }
    if layout.shard is not None:
        described["shard"] = dataclasses.asdict(layout.shard)
    if layout.pieces:
        described["pieces"] = {
            name: dataclasses.asdict(piece) for name, piece in layout.pieces.items()
        }
    about = {**metadata, KEY: to_json(described).decode(), CHECKSUM: _zeros}
    text = padded({"__metadata__": about, **entries})
    crc = zlib.crc32(text)
    text = text.replace(_entry(_zeros), _entry(f"{crc:08x}"))
    whole = with_length(text)
    return whole, {name: len(whole) + start for name, start in starts.items()}


def _entry(checksum: str) -> bytes:
    # No string of JSON has bare quotes, so this is the key, wherever it is found.
    return f'"{CHECKSUM}":"{checksum}"'.encode()


def read_layout(file: TensorFile) -> Layout | None:
    """That of a file; None if it is not one of eqquant's."""
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
            f"{where}: the header is not the one that eqquant wrote: the file is "
            "damaged, or something else wrote it again."
        )
    parsed = parse_object(file.metadata[KEY].encode(), f"{where}: the layout")
    version = parsed.get("version")
    if version != VERSION or type(version) is not int:
        raise ValueError(
            f"{where}: the layout has the version {version!r}; this version of eqquant "
            f"reads {VERSION}."
        )
    expected = {"version", "records", "checksums"}
    if parsed.keys() - {"shard", "pieces"} != expected:
        raise ValueError(f"{where}: the layout must have {sorted(expected)}.")
    return Layout(
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
        raise ValueError(f"{where}: records must say what each leaf is.")
    return records


def _checksums(checksums: Any, file: TensorFile) -> dict[str, int]:
    if not isinstance(checksums, dict) or checksums.keys() != file.tensors.keys():
        raise ValueError(f"{file.path}: checksums must be those of its tensors.")
    for name, value in checksums.items():
        if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{8}", value):
            raise ValueError(f"{file.path}: {name!r} has the checksum {value!r}.")
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
            f"{where}: shard must have saved, number and count, and a number from 1 to "
            f"count; got {shard!r}."
        )
    return Shard(**shard)


def _pieces(pieces: Any, file: TensorFile) -> dict[str, Piece]:
    if not isinstance(pieces, dict) or not pieces.keys() <= file.tensors.keys():
        raise ValueError(f"{file.path}: pieces must be some of its tensors.")
    return {name: _piece(name, piece, file) for name, piece in pieces.items()}


def _piece(name: str, piece: Any, file: TensorFile) -> Piece:
    held = file.tensors[name].shape
    if (
        not isinstance(piece, dict)
        or piece.keys() != {"of", "shape", "start"}
        or not isinstance(piece["of"], str)
        or not are_sizes(piece["shape"])
        or not are_sizes(piece["start"])
        or not held
        or not len(piece["shape"]) == len(piece["start"]) == len(held)
        or any(
            start + part > size or not part
            for start, part, size in zip(
                piece["start"], held, piece["shape"], strict=True
            )
        )
    ):
        raise ValueError(
            f"{file.path}: {name!r} of the shape {held} is no piece as it is described "
            f"to be: {piece!r}."
        )
    return Piece(piece["of"], tuple(piece["shape"]), tuple(piece["start"]))
