"""Progress bars."""

import sys
from collections.abc import Iterable
from typing import TypeVar


# The number of elements from which on a progress bar is shown.
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
    """Yield the items, with an optional progress bar titled `what`.

    The default is a progress bar for large models in a terminal, if tqdm is installed.
    """
    title, item_name = what
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
    return tqdm.tqdm(items, desc=title, unit=item_name)
