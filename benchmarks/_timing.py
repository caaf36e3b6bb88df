"""Interleaved timing: what is compared is measured in turn, in one run."""

import random
import statistics
import time
from collections.abc import Callable

import jax


def interleaved(
    candidates: dict[str, Callable[[], object]],
    *,
    seconds: float = 1.0,
    at_least: int = 7,
) -> dict[str, list[float]]:
    """Seconds of each run of each candidate. Everything is compiled before. The order
    changes from round to round, as what runs before leaves its mark on the caches."""
    for fn in candidates.values():
        jax.block_until_ready(fn())
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = random.Random(0)
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times[next(iter(times))]) < at_least:
        for name, fn in order.sample(list(candidates.items()), len(candidates)):
            start = time.perf_counter()
            jax.block_until_ready(fn())
            times[name].append(time.perf_counter() - start)
    return times


def median(times: list[float]) -> float:
    return statistics.median(times)


def machine() -> str:
    device = jax.devices()[0]
    return f"jax {jax.__version__}, {device.platform} ({device.device_kind})"
