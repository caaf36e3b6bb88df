"""Count the instructions of a TPU kernel in the text files that libtpu dumps.

A bundle is a group of instructions that a core issues in one cycle. The largest loop of
a kernel iterates over its grid. One iteration of that loop is a step; each bundle of an
inner loop is counted once per iteration.
"""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Count:
    """Totals for one step.

    `step` counts the cycles of bundles that every step executes, and `rare` the cycles
    of bundles that only some steps execute. `products` and `pushes` count instructions.
    `busiest` names the unit with the highest utilization.
    """

    step: int
    rare: int
    products: int
    pushes: int
    busiest: str


_bundle = re.compile(r"^\s*(?:0x[0-9a-f]+|\d+)\s+(?:LH|LB|LE|PB|PF|CT|)\s*:\s*[> ]*\{")
_branch = re.compile(r"sbr\.rel \(!?(%p[0-9a-z_]+)\) target = \$region(\d+)")
_region = re.compile(
    r"(?:Start/End empty regions?|Start regions?|empty region) ([0-9]+)"
)

# The compiler's names of units, and the names that the tables print.
_units = {
    "MATMUL": "multiply",
    "MATPUSH": "push",
    "XLU": "permute",
    "VALU": "arithmetic",
    "VPOP": "pop",
    "EUP": "transcendental",
    "VLOAD": "load",
    "VSTORE": "store",
    "SALU": "scalar",
}


def _read_bundles(path: str) -> list[str]:
    bundles: list[str] = []
    with open(path) as file:
        for line in file:
            if _bundle.match(line):
                bundles.append(line)
            elif bundles:
                bundles[-1] += line
    return bundles


def _read_utilization(path: str) -> tuple[dict[str, int], list[list[int]]]:
    """Return the number of units of each kind, and how many each bundle keeps busy."""
    with open(path) as file:
        _, names, capacity, _, *rows = [line.split() for line in file if line.strip()]
    units = dict(zip((n.strip(",") for n in names), map(int, capacity), strict=True))
    return units, [list(map(int, row)) for row in rows]


def _trips(text: str, predicate: str) -> int:
    """Return the trip count of a loop that counts from zero to a constant, otherwise 1.

    Loops over the grid and loops that wait need not have a constant trip count.
    """
    end = re.search(rf"{predicate} = scmp\S+ (%s\w+), (\d+)", text)
    step = end and re.search(rf"{end[1]} = sadd\.s32 (\d+), ", text)
    return max(int(end[2]) // int(step[1]), 1) if end and step else 1


def _branches(bundles: list[str]) -> tuple[list[tuple], list[tuple[int, int]]]:
    """Return the loops and the forward branches.

    A loop is (first bundle, last bundle, trip count). A forward branch is the half-open
    range of bundles that it skips.
    """
    label: dict[int, int] = {}
    for i, text in enumerate(bundles):
        for match in _region.finditer(text):
            label.setdefault(int(match[1]), i)
    loops, skips = [], []
    for i, text in enumerate(bundles):
        for match in _branch.finditer(text):
            target = label.get(int(match[2]))
            if target is not None and target <= i:
                trips = _trips("".join(bundles[target : i + 1]), match[1])
                loops.append((target, min(i + 4, len(bundles) - 1), trips))
            elif target is not None:
                skips.append((i + 5, target))
    return loops, skips


def _times(loops: list[tuple], size: int) -> dict[int, int]:
    """Map the index of each bundle to the number of times that a step issues it."""
    start, end, _ = max(loops, key=lambda l: l[1] - l[0], default=(0, size - 1, 1))
    times = dict.fromkeys(range(start, end + 1), 1)
    for first, last, trips in loops:
        if (first, last) != (start, end) and start <= first and last <= end:
            for i in range(first, last + 1):
                times[i] *= trips
    return times


def _rare(bundles: list[str], skips, times: dict[int, int]) -> set[int]:
    """Return the bundles that only some steps execute.

    These are the bundles that a branch can skip, unless they hold 30% or more of the
    matrix instructions.
    """

    def work(indices) -> int:
        texts = ((times.get(i, 1), bundles[i]) for i in indices)
        return sum(n * (("vmatmul" in t) + ("vmatpush" in t)) for n, t in texts)

    total = work(times)
    rare: set[int] = set()
    for first, last in sorted(skips, key=lambda s: s[0] - s[1]):
        inside = first < last and first in times and last in times
        skipped = range(first, last)
        if inside and first not in rare and work(skipped) < 0.3 * max(total, 1):
            rare.update(skipped)
    return rare


def _busiest(utilization, times: dict[int, int]) -> str:
    """Name the unit with the highest utilization, and give that utilization."""
    units, busy = utilization
    cycles = sum(times.values())
    share = {
        # libtpu counts the loads and stores of spilled registers twice.
        _units[name]: sum(n * busy[i][column] for i, n in times.items())
        / available
        / cycles
        for column, (name, available) in enumerate(units.items())
        if name in _units
    }
    busiest = max(share, key=share.__getitem__)
    return f"{busiest} {share[busiest]:.0%}"


def count(bundles_path: str, utilization_path: str) -> Count:
    """Count the instructions of a kernel in the two files that libtpu dumps for it."""
    bundles = _read_bundles(bundles_path)
    utilization = _read_utilization(utilization_path)
    assert len(utilization[1]) == len(bundles)
    loops, skips = _branches(bundles)
    times = _times(loops, len(bundles))
    rare = _rare(bundles, skips, times)
    kept = {i: n for i, n in times.items() if i not in rare}

    def instructions(name: str) -> int:
        return sum(n * len(re.findall(name, bundles[i])) for i, n in kept.items())

    return Count(
        step=sum(kept.values()),
        rare=sum(times[i] for i in rare),
        products=instructions(r"\bvmatmul\S*"),
        pushes=instructions(r"\bvmatpush\S*"),
        busiest=_busiest(utilization, kept),
    )
