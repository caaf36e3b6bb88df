"""Replace files atomically: write beside the target, sync, and rename."""

import contextlib
import os
import pathlib
import secrets
from collections.abc import Iterator
from typing import BinaryIO


PART = ".part"


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends and all of its data is on
    the disk. If the block fails, `path` is unchanged."""
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
    """Sync a folder to the disk. The names of its files are data of the folder."""
    if os.name == "nt":
        return  # Windows cannot open folders.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
