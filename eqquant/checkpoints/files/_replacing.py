"""Files that are whole at any time: written beside their place, synced, and renamed."""

import contextlib
import os
import pathlib
import secrets
from collections.abc import Iterator
from typing import BinaryIO


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
