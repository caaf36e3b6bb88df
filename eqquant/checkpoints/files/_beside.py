"""The files of a Hugging Face folder that are not weights."""

import pathlib
import shutil
from collections.abc import Sequence

from ._replacing import replacing
from ._source import INDEX


# The suffixes of configuration, tokenizer and license.
_copied = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md")


def copy_others(
    source: pathlib.Path, folder: pathlib.Path, without: Sequence[str] = ()
) -> None:
    """Copy the configuration, the tokenizer and the license into another folder."""
    for file in sorted(source.iterdir()):
        is_copied = file.suffix in _copied and not file.name.endswith(INDEX)
        target = folder / file.name
        is_same = target.exists() and target.samefile(file)
        if is_copied and file.is_file() and not is_same and file.name not in without:
            with file.open("rb") as original, replacing(target) as copy:
                shutil.copyfileobj(original, copy)
