"""Computation while a program is traced or lowered."""

import concurrent.futures
from collections.abc import Callable
from typing import Any


def apart(fn: Callable, *args: Any) -> Any:
    """Call `fn(*args)` in a new thread, where no trace and no mesh is in context.

    Otherwise a computation in the middle of a lowering would become part of the lowered
    program.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(fn, *args).result()
