"""Progress bars."""

import sys
from collections.abc import Iterable
from typing import TypeVar


# A progress bar is for what takes seconds: for so many elements.
_long_work = 2**27
Item = TypeVar("Item")


def with_progress(
    items: Iterable[Item],
    elements: int,
    shown: bool | None,
    *,
    caller: str,
    what: tuple[str, str] = ("quantizing", "array"),
) -> Iterable[Item]:
    """The items, with a progress bar if there should be one: by default for many
    elements in a terminal, if tqdm is there. `what` is done, to which of them."""
    doing, unit = what
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
    return tqdm.tqdm(items, desc=doing, unit=unit)
