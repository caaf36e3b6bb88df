"""Computing something while a program is traced, or lowered."""

import concurrent.futures
from collections.abc import Callable
from typing import Any


def apart(fn: Callable, *args: Any) -> Any:
    """`fn(*args)` in a thread of its own, where nothing is being traced or lowered and
    no mesh is in context. What is compiled in the middle of a lowering would become
    part of the program that is lowered."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(fn, *args).result()
