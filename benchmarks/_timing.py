"""Time several JAX functions in alternation."""

import functools as ft
import statistics
import time
from collections.abc import Callable

import _interleaved
import jax


def interleaved(
    candidates: dict[str, Callable[[], object]],
    *,
    seconds: float = 1.0,
    at_least: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of every run of every candidate, including its computation."""
    calls = {name: ft.partial(_finish, fn) for name, fn in candidates.items()}
    return _interleaved.interleaved(
        calls, seconds=seconds, at_least=at_least, clock=clock
    )


def _finish(fn: Callable[[], object]) -> None:
    jax.block_until_ready(fn())


def median(times: list[float]) -> float:
    return statistics.median(times)


def machine() -> str:
    device = jax.devices()[0]
    return f"jax {jax.__version__}, {device.platform} ({device.device_kind})"
