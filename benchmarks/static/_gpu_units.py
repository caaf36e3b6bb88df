"""Count the work of each unit of a GPU core per weight, and bound a kernel's speed.

The counts come from the instructions of the kernel's loop, or of the whole kernel if it
has no loop. Rates per cycle and core are from NVIDIA's tables of arithmetic throughput.
A kernel that waits for results or for other warps is slower: expect 70 to 80% of a
bound.
"""

import math
import re
from typing import NamedTuple

from _gpu_sass import instructions_in, loop_ranges, loops_in, names_in
from eqquant._jax import GPU
from eqquant.debug import GPUKernel


# Bytes of shared memory per cycle.
_shared = 128
_alu = re.compile(
    r"LOP3|PLOP3|PRMT|SHF|SGXT|SEL|FSEL|ISETP|FSETP|IADD|VIADD|LEA|IMNMX|VIMNMX|POPC"
)
_fma = re.compile(r"FFMA|FMUL|FADD|HFMA2|HMUL2|HADD2")
_convert = re.compile(r"I2F|F2I|F2F\b")


class Units(NamedTuple):
    """Instructions of one thread per weight; `shared` counts bytes per weight."""

    issued: float
    alu: float
    fma: float
    imad: float
    shared: float

    def cycles(self, chip: GPU) -> dict[str, float]:
        """Return the cycles of a core that each unit takes per weight."""
        return {
            "issue": self.issued / 128,
            "ALU": self.alu / 64,
            "FMA": self.fma / chip.lanes + self.imad / 64,
            "shared": self.shared / _shared,
        }


def units_of(kernel: GPUKernel, weights: float) -> Units:
    """Count the instructions of a loop in which a thread decodes `weights` weights."""
    return _units(max(loops_in(kernel), key=len, default=names_in(kernel)), weights)


def _units(names: list[str], weights: float) -> Units:
    names = [name for name in names if name != "NOP"]
    alu = sum(bool(_alu.match(name)) for name in names)
    fma = sum(bool(_fma.match(name)) for name in names)
    imad = sum(name.startswith("IMAD") for name in names)
    # Conversions run at a quarter of the ALU's rate.
    alu += 4 * sum(bool(_convert.match(name)) for name in names)
    moved = 0.0
    for name in names:
        if re.match(r"LDS|STS", name):
            moved += _width(name)
    return Units(*(x / weights for x in (len(names), alu, fma, imad, moved)))


class Pipelined(NamedTuple):
    """The work of the kernel in which decoding and tensor cores overlap.

    - `step`: instructions of a thread from one step to the next.
    - `between`: cycles of a step in which tensor cores have no work of this warpgroup.
    - `tile`: instructions of a tile outside of its steps.
    - `shared`: bytes that move in or out of shared memory in a step, including reads by
      tensor cores.
    """

    step: Units
    between: int
    tile: int
    shared: float


def pipelined(
    kernel: GPUKernel, pipeline, step_bytes: int, integers: bool
) -> Pipelined:
    """Analyse the loops of a kernel whose steps load `step_bytes` bytes each.

    A step also loads 128 bytes for each row of the activation.
    """
    listed = [(x.name, x.stall) for x in instructions_in(kernel)]
    loops = [listed[start:stop] for start, stop in loop_ranges(kernel)]
    loops = sorted((loop for loop in loops if _multiplies(loop)), key=len)
    step, tile = ([x for x in loop if x[0] != "NOP"] for loop in loops[:2])
    at = next(i for i, (name, _) in enumerate(step) if "WARPGROUP.DEPBAR" in name)
    rotated = [*step[at:], *step[:at]]
    first = next(i for i, (name, _) in enumerate(rotated) if "GMMA" in name)
    between = sum(max(stall, 1) for _, stall in rotated[:first])
    weights = (128 if integers else 64) * pipeline.rows
    units = _units([name for name, _ in step], weights / 256)
    # Both warpgroups read all rows of the activation; each reads its own integers.
    moved = 2 * 128 * pipeline.m + step_bytes + units.shared * weights
    if integers:  # One product is still pending at the wait.
        moved, between = moved + weights, 0
    # A tile repeats the last step and the first decode outside of its loop.
    return Pipelined(units, between, len(tile) - len(step), moved)


def _multiplies(loop: list[tuple[str, int]]) -> bool:
    return any("GMMA" in name for name, _ in loop)


def _width(name: str) -> int:
    if name.startswith("LDSM"):
        return 4 * int(name[-1]) if name[-1].isdigit() else 4
    # Accesses of less than 4 bytes occupy 4 bytes of bandwidth.
    digits = re.search(r"\.U?(64|128)$", name)
    return int(digits[1]) // 8 if digits else 4


def bound(units: Units, chip: GPU, stored: float) -> tuple[float, str]:
    """Return the largest share of memory bandwidth that a kernel can use.

    `stored` is the number of bytes per weight. The second result names the unit that
    limits the kernel.
    """
    unit, cycles = max(units.cycles(chip).items(), key=lambda item: item[1])
    share = chip.cores * chip.clock / cycles * stored / chip.bandwidth
    return share, unit if share < 1 else "memory"


def launched(program, kernel_name: str) -> tuple[int, int, int] | None:
    """Return the blocks, threads per block and shared memory bytes of a launch.

    Return None if the program does not launch the kernel.
    """
    name, size = re.escape(kernel_name), r"\[(\d+), (\d+), (\d+)\]"
    pattern = rf"\] {name} grid: {size} threads: {size}.*?shared_memory: (\d+)"
    found = re.search(pattern, program.launches)
    if found is None:
        return None
    numbers = list(map(int, found.groups()))
    return math.prod(numbers[:3]), math.prod(numbers[3:6]), numbers[6]


def in_flight(
    kernel: GPUKernel, tiles, unit: int, chip: GPU, grid: int, dynamic: int
) -> float:
    """Return the KiB of codes that a core has in flight. Tiles count units of `unit`
    bytes.

    Registers, shared memory and the size of the grid limit the resident programs. A
    launch allocates `dynamic` bytes of shared memory.
    """
    threads = 32 * tiles.warps
    registers = -(-kernel.registers // 8) * 8 * threads
    programs = min(
        chip.registers // registers,
        chip.threads // threads,
        chip.shared // (kernel.shared + dynamic + 1024),
        -(-grid // chip.cores),
    )
    tile = tiles.rows * tiles.bytes * tiles.subtiles * unit
    return programs * tile * (tiles.stages - 1) / 2**10
