"""Time several calls in alternation. This module does not import JAX or PyTorch."""

import random
import time
from collections.abc import Callable


def interleaved(
    calls: dict[str, Callable[[], object]],
    *,
    seconds: float,
    at_least: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of every run of every call, measured with `clock`.

    Each call runs twice first, so that compilation is not timed. The order changes from
    round to round, because each call finds the caches as the previous call left them.
    """
    for call in calls.values():
        call(), call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(next(iter(times.values()))) < at_least:
        for name, call in order.sample(list(calls.items()), len(calls)):
            start = clock()
            call()
            times[name].append(clock() - start)
    return times
