"""What units of a core a kernel keeps busy, for each weight, and how fast it can be at
most: by the instructions of its loop, or of all of it if it has none.

Rates are those of NVIDIA's tables of arithmetic throughput, per cycle and core. A
kernel that waits for results, or for other warps, is slower: expect 70 to 80% of a
bound.
"""

import math
import re
from typing import NamedTuple

from eqquant._jax import GPU
from eqquant.debug import GPUKernel


# Of shared memory, bytes a cycle.
_shared = 128
_alu = re.compile(
    r"LOP3|PLOP3|PRMT|SHF|SGXT|SEL|FSEL|ISETP|FSETP|IADD|VIADD|LEA|IMNMX|VIMNMX|POPC"
)
_fma = re.compile(r"FFMA|FMUL|FADD|HFMA2|HMUL2|HADD2")
_convert = re.compile(r"I2F|F2I|F2F\b")


class Units(NamedTuple):
    """For each weight; of one thread, but for `shared`, which is in bytes."""

    issued: float
    alu: float
    fma: float
    imad: float
    shared: float

    def cycles(self, chip: GPU) -> dict[str, float]:
        """Of a core, that each unit takes for a weight."""
        return {
            "issue": self.issued / 128,
            "ALU": self.alu / 64,
            "FMA": self.fma / chip.lanes + self.imad / 64,
            "shared": self.shared / _shared,
        }


def units_of(kernel: GPUKernel, weights: float) -> Units:
    """`weights` are those of a thread, in the loop."""
    return _units(max(kernel.loops, key=len, default=kernel.instructions), weights)


def _units(names: list[str], weights: float) -> Units:
    names = [name for name in names if name != "NOP"]
    alu = sum(bool(_alu.match(name)) for name in names)
    fma = sum(bool(_fma.match(name)) for name in names)
    imad = sum(name.startswith("IMAD") for name in names)
    # A quarter as many a cycle.
    alu += 4 * sum(bool(_convert.match(name)) for name in names)
    moved = 0.0
    for name in names:
        if re.match(r"LDS|STS", name):
            moved += _width(name)
    return Units(*(x / weights for x in (len(names), alu, fma, imad, moved)))


class Pipelined(NamedTuple):
    """Of the kernel in which tensor cores multiply a step of a warpgroup while it
    decodes the next one, instructions of a thread: from one step to the next; of
    these, cycles of those while tensor cores have none of its products; and those of a
    tile of the result beside its steps. `shared` are bytes of shared memory that go in
    or out in a step, by tensor cores, too."""

    step: Units
    between: int
    tile: int
    shared: float


def pipelined(
    kernel: GPUKernel, pipeline, step_bytes: int, integers: bool
) -> Pipelined:
    """By its loops, where a step brings so many bytes to a program, 128 for each row of
    the activation."""
    listed = list(zip(kernel.instructions, kernel.stalls, strict=True))
    loops = [listed[start:stop] for start, stop in kernel.places_of_loops]
    loops = sorted((loop for loop in loops if _multiplies(loop)), key=len)
    step, tile = ([x for x in loop if x[0] != "NOP"] for loop in loops[:2])
    at = next(i for i, (name, _) in enumerate(step) if "WARPGROUP.DEPBAR" in name)
    turned = [*step[at:], *step[:at]]
    first = next(i for i, (name, _) in enumerate(turned) if "GMMA" in name)
    between = sum(max(stall, 1) for _, stall in turned[:first])
    weights = (128 if integers else 64) * pipeline.rows
    units = _units([name for name, _ in step], weights / 256)
    # Each of two warpgroups reads all rows of the activation, and integers of its own.
    moved = 2 * 128 * pipeline.m + step_bytes + units.shared * weights
    if integers:  # Of which one product is still to be done when it waits.
        moved, between = moved + weights, 0
    # A tile has the last step, and the first codes, once more.
    return Pipelined(units, between, len(tile) - len(step), moved)


def _multiplies(loop: list[tuple[str, int]]) -> bool:
    return any("GMMA" in name for name, _ in loop)


def _width(name: str) -> int:
    if name.startswith("LDSM"):
        return 4 * int(name[-1]) if name[-1].isdigit() else 4
    # Of less than a word the rest is wasted.
    digits = re.search(r"\.U?(64|128)$", name)
    return int(digits[1]) // 8 if digits else 4


def bound(units: Units, chip: GPU, stored: float) -> tuple[float, str]:
    """The largest share of the memory's bandwidth, and what limits it: of weights that
    take so many bytes each."""
    unit, cycles = max(units.cycles(chip).items(), key=lambda item: item[1])
    share = chip.cores * chip.clock / cycles * stored / chip.bandwidth
    return share, unit if share < 1 else "memory"


def launched(program, kernel_name: str) -> tuple[int, int, int] | None:
    """Of a kernel that a program starts: blocks, threads of each, and bytes of shared
    memory; None if it says nothing of it."""
    name, size = re.escape(kernel_name), r"\[(\d+), (\d+), (\d+)\]"
    pattern = rf"\] {name} grid: {size} threads: {size}.*?shared_memory: (\d+)"
    found = re.search(pattern, program.launches)
    if found is None:
        return None
    numbers = list(map(int, found.groups()))
    return math.prod(numbers[:3]), math.prod(numbers[3:6]), numbers[6]


def in_flight(kernel: GPUKernel, tiles, chip: GPU, grid: int, dynamic: int) -> float:
    """Kibibytes of codes that a core waits for: by registers and shared memory, of
    which a launch asks for `dynamic` bytes, and by how many programs there are."""
    threads = 32 * tiles.warps
    registers = -(-kernel.registers // 8) * 8 * threads
    programs = min(
        chip.registers // registers,
        chip.threads // threads,
        chip.shared // (kernel.shared + dynamic + 1024),
        -(-grid // chip.cores),
    )
    tile = tiles.rows * tiles.bytes * tiles.subtiles
    return programs * tile * (tiles.stages - 1) / 2**10
