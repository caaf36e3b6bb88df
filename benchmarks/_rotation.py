"""Weights in rotation, so that none is in a cache when its turn comes. Imports none of
what is measured."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def rotation(
    make: Callable[[], Any], size: int, gigabytes: float, each: int
) -> Iterator[tuple]:
    """Groups of so many weights of `size` bytes, one group after the other, again and
    again. All together take so many gigabytes, and are at least two groups."""
    groups = max(2, math.ceil(gigabytes * 1e9 / size / each))
    return itertools.cycle([tuple(make() for _ in range(each)) for _ in range(groups)])


def sizes_for(out_bytes: int, most: int = 32, room: float = 1e9) -> tuple[int, int]:
    """How many products a call has, and how many calls are made before their results
    are waited for: a call costs the host more than a product may cost a GPU. All of
    the results are in memory at the end."""
    group = max(1, min(most, int(room // out_bytes)))
    return group, max(1, min(8, int(room // (group * out_bytes))))


def summary(times: Sequence[float], each: int) -> tuple[float, float]:
    """Microseconds of a product, of so many that are measured at once: the median, and
    the fastest."""
    ordered = sorted(times)
    middle = len(ordered) // 2
    median = (ordered[middle] + ordered[~middle]) / 2
    return median / each * 1e6, ordered[0] / each * 1e6
