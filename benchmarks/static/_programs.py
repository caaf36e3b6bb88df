"""Count the kernels and the collectives of a program that XLA compiled."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple


class Moved(NamedTuple):
    """The key of a count of bytes: a kind of collective and a dtype."""

    kind: str
    dtype: str


class Program:
    """The parsed text of a `jax.stages.Compiled`."""

    def __init__(self, text: str):
        self.lines: dict[str, list[str]] = {}
        self.entry = name = ""
        for line in text.splitlines():
            if header := _header.match(line):
                name = header[2]
                self.lines[name] = []
                self.entry = name if header[1] else self.entry
            elif name:
                self.lines[name].append(line)

    def run(self) -> Iterator[tuple[str, int]]:
        """Yield every instruction and the number of times that it runs."""
        todo = [(self.entry, 1)]
        while todo:
            name, times = todo.pop()
            for line in self.lines[name]:
                yield line, times
                called = dict(_called.findall(line))
                trips = self.trips(called["condition"]) if "body" in called else 1
                todo += [(inner, times * trips) for inner in called.values()]

    def trips(self, condition: str) -> int:
        """Return the trip count of a loop that counts up to a constant."""
        text = "\n".join(self.lines[condition])
        return max(int(n) for n in _constant.findall(text))

    def kernels(self) -> Counter:
        """Count the kernels of the program by name."""
        names = Counter()
        for line, _ in self.run():
            if 'custom_call_target="tpu_custom_call"' in line:
                names[_kernel.search(line)[1]] += 1
        return names

    def collectives(self) -> tuple[Counter, Counter]:
        """Count collectives by kind, and their bytes by kind and dtype.

        Bytes are the results on one device in one run of the program.
        """
        count, total = Counter(), Counter()
        for line, times in self.run():
            found = _collective.search(line)
            if not found:
                continue
            results, kind, started = found.groups()
            arrays = _array.findall(results)
            if started and kind != "all-reduce":
                # The tuple holds operands, then results, then scalars for bookkeeping.
                arrays = [(dtype, sizes) for dtype, sizes in arrays if sizes]
                arrays = arrays[len(arrays) // 2 :]
            count[kind] += 1
            for dtype, sizes in arrays:
                size = math.prod(int(n) for n in sizes.split(",") if n)
                total[Moved(kind, dtype)] += times * size * _bytes(dtype)
        return count, total


def _bytes(dtype: str) -> int:
    return max(int(re.findall(r"\d+", dtype)[0]) // 8, 1) if dtype != "pred" else 1


_header = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_called = re.compile(
    r"\b(body|condition|calls|to_apply|called_computations)=\{?%?([\w.\-]+)"
)
_constant = re.compile(r"[su]32\[\]\S* constant\((\d+)\)")
_kernel = re.compile(r"%?([\w\-]+)[.\w]* = ")
_collective = re.compile(
    r" = (\(.*?\)|\S+) "
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_array = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
