"""Progress bars."""

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar


# A progress bar is for what takes seconds: for so many elements.
_long_work = 2**27
Item = TypeVar("Item")


def with_progress(
    items: Sequence[Item], elements: int, shown: bool | None, *, caller: str
) -> Iterable[Item]:
    """The items, with a progress bar if there should be one: by default for many
    elements in a terminal, if tqdm is there."""
    if shown is None:
        shown = elements >= _long_work and sys.stderr.isatty()
        try:
            import tqdm
        except ImportError:
            shown = False
    if not shown:
        return items
    try:
        import tqdm
    except ImportError as error:
        raise ImportError(
            f"{caller}: progress=True needs tqdm: `pip install eqquant[progress]`."
        ) from error
    return tqdm.tqdm(items, desc="quantizing", unit="array")
