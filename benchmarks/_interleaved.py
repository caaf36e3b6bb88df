"""Times of calls, measured in turn in one run. Imports none of what is measured."""

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
    """Seconds of each run of each call, by `clock`. Everything is compiled before. The
    order changes from round to round, as what runs before leaves its mark on the
    caches."""
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
