"""Formats, byte budgets and progress of the scripts that measure accuracy by rows."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import eqquant
import equinox as eqx
import jax


NF4 = eqquant.NF4(scale_dtype="bfloat16", fit="search")
TRELLIS = [eqquant.formats.Trellis(bits=bits) for bits in (4, 3, 2)]
WITH_TRELLIS = (
    *TRELLIS,
    eqquant.formats.Int5(block_size=64, scale_dtype="bfloat16", fit="search"),
    eqquant.formats.Int6(scale_dtype="bfloat16", fit="search"),
    eqquant.Int8(),
)

_Result = TypeVar("_Result")


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    """Print the seconds of the processors, and in parentheses of the clock."""
    clocks = time.process_time, time.perf_counter
    begin = [clock() for clock in clocks]
    yield
    cpu, wall = (clock() - start for clock, start in zip(clocks, begin, strict=True))
    print(f"{name}: {cpu:.0f} s CPU ({wall:.0f} s)", file=sys.stderr)


def unless_missing(
    name: str, is_other: bool, fn: Callable[[], _Result]
) -> _Result | None:
    """Return `fn()`. If another library (`is_other`) fails, print the reason, and
    return None."""
    try:
        return fn()
    except (RuntimeError, subprocess.TimeoutExpired) as problem:
        if not is_other:
            raise
        print(f"NOT MEASURED: {name}: {problem}", file=sys.stderr)
        return None


class Allocations:
    """Allocates formats to each matrix of a model, and quantizes.

    Budgets for the same formats share the measurements."""

    def __init__(self, model: Any, stats: eqquant.calibration.Statistics):
        self.model, self.stats = model, stats
        arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
        self.size = sum(array.size for array in arrays)
        self._known: dict[tuple, eqquant.calibration.Allocation] = {}

    def quantized(self, bits: float, formats: tuple) -> Any:
        """Return the model with at most `bits` bits per weight."""
        budget = int(bits * self.size / 8)
        if formats not in self._known:
            self._known[formats] = eqquant.allocate(
                self.model, budget, formats, self.stats, rotate=True
            )
        rules = self._known[formats].within(budget)
        print(rules, file=sys.stderr)
        return eqquant.quantize_tree(
            self.model, rules=rules, calibration=self.stats, rotate=True
        )
