"""Rotate through copies of a weight, so that no cache holds the next copy.

This module does not import JAX or PyTorch.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def rotation(
    make: Callable[[], Any], size: int, gigabytes: float, count: int
) -> Iterator[tuple]:
    """Cycle through groups of `count` weights of `size` bytes.

    All groups together take at least `gigabytes` GB. There are at least two groups.
    """
    groups = max(2, math.ceil(gigabytes * 1e9 / size / count))
    return itertools.cycle([tuple(make() for _ in range(count)) for _ in range(groups)])


def sizes_for(out_bytes: int, limit: int = 32, room: float = 1e9) -> tuple[int, int]:
    """Return the matmuls in a call, and the calls before the host waits for results.

    A call can cost the host more time than a matmul costs a GPU. The results of these
    calls are in memory at once and must fit into `room` bytes.
    """
    group = max(1, min(limit, int(room // out_bytes)))
    return group, max(1, min(8, int(room // (group * out_bytes))))


def summary(times: Sequence[float], count: int) -> tuple[float, float]:
    """Return the median and the minimum in microseconds of one of `count` matmuls."""
    ordered = sorted(times)
    middle = len(ordered) // 2
    median = (ordered[middle] + ordered[~middle]) / 2
    return median / count * 1e6, ordered[0] / count * 1e6
