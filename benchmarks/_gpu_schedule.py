"""How many cycles a kernel of Ampere or Ada takes: an estimate, by what NVIDIA's
assembler made of it.

The four schedulers of a core are run cycle by cycle. Each issues one instruction a
cycle, of the warp that it issued of before, or else of the youngest that can. A warp
waits for the cycles and scoreboards that are written into its instructions, for the
unit that an instruction needs, for the others of its program at a barrier, and for what
it copies from memory.

- The schedulers, and what the bits of an instruction mean: Huerta et al., "Dissecting
  and Modeling the Architecture of Modern GPU Cores", 2025.
- Latencies of shared memory: Sun et al., "Dissecting Tensor Cores via Microbenchmarks",
  2022; of the rest about: Abdelkhalik et al., "Demystifying the Nvidia Ampere
  Architecture through Microbenchmarking and Instruction-level Analysis", 2022. Those of
  tensor cores and arithmetic are among the cycles that are written into instructions.
- What units do a cycle: NVIDIA's tables of arithmetic throughput, and data sheets.

Not in it: caches of instructions, banks of registers and of shared memory, jumps other
than that of the loop, and memory that is too slow for what is copied.
"""

import math
import re
from typing import NamedTuple

from _gpu_times import rates
from eqquant._jax import GPU
from eqquant.debug import GPUInstruction, GPUKernel


# Cycles until a scoreboard is free, if results are waited for.
_latencies = {"LDSM": 33, "LDS": 24, "LDG": 500, "LDGSTS": 600, "MUFU": 30, "S2R": 30}
_others = 24  # Conversions, stores.
_read = 12  # Until operands are read.
_taken = 10  # Cycles to jump back, and to leave a barrier.
_started = 500  # Of a program, after the one before.
_copied = 512  # By so much copies from memory may be later.


class Use(NamedTuple):
    """Of an instruction: the unit that it needs, and for how many cycles that is busy.
    `"shared"` is one for all schedulers."""

    unit: str
    cycles: float


def can_schedule(chip: GPU) -> bool:
    """Whether a chip's tensor cores multiply what a warp has in registers, as here."""
    return chip.architecture in ("sm_80", "sm_89")


def use_of(name: str, chip: GPU) -> Use:
    if found := re.match(r"(HMMA|IMMA)\.(\d+)", name):
        integers = found[1] == "IMMA"
        products = {"16816": 2048, "1688": 1024, "16832": 4096}[found[2]]
        return Use("tensor", 4 * products / rates[chip.architecture][integers])
    if re.match(r"LDSM|LDS|STS|LDGSTS|LDG|STG|ATOM|RED|SHFL", name):
        return Use("shared", max(1, _bytes_of(name) / 4))
    if re.match(r"MUFU|I2F|F2I|F2F\b", name):
        return Use("convert", 8)
    if re.match(r"FFMA|FMUL|FADD|HFMA2|HMUL2|HADD2", name):
        return Use("FMA", 64 / chip.lanes * 2 if name[0] == "F" else 2)
    if name.startswith("IMAD"):
        return Use("FMA", 2)
    if re.match(r"U[A-Z]|BAR|BRA|NOP|DEPBAR|LDGDEPBAR|CS2R|S2R|EXIT|WARPSYNC", name):
        return Use("", 0)
    return Use("ALU", 2)


def _bytes_of(name: str) -> int:
    """Of a thread."""
    if name.startswith("LDSM"):
        return 4 * int(name[-1])
    wide = re.search(r"\.U?(64|128)\b", name)
    return int(wide[1]) // 8 if wide else 4


class _Step(NamedTuple):
    """Of a [`GPUInstruction`][], what a warp waits for."""

    kind: str
    use: Use
    stall: int
    yields: bool
    writes: int | None
    reads: int | None
    waits: tuple[int, ...]
    latency: int
    left: int  # Copies that may be left to come, of `DEPBAR`.


def _step(x: GPUInstruction, chip: GPU) -> _Step:
    kind = x.name.split(".")[0]
    latency = _latencies.get(kind, _others)
    left = re.search(r"SB0, 0x([0-9a-f]+)", x.operands)
    use = use_of(x.name, chip)
    if x.operands.startswith("RZ, [RZ]"):  # Does nothing, to keep others apart.
        use = Use("", 0)
    latency += math.ceil(use.cycles) - 1
    return _Step(
        kind=kind,
        use=use,
        stall=max(x.stall, 1),
        yields=x.yields,
        writes=x.writes,
        reads=x.reads,
        waits=x.waits,
        latency=latency,
        left=int(left[1], 16) if left else 0,
    )


class _Program:
    """What its warps share: how many are at a barrier, how many barriers have been
    passed, and when the last one opened."""

    def __init__(self, warps: int):
        self.warps, self.arrived, self.passed, self.opened = warps, 0, 0, 0.0

    def arrive(self, now: float) -> None:
        self.arrived += 1
        if self.arrived == self.warps:
            self.arrived, self.passed = 0, self.passed + 1
            self.opened = now + _taken


class _Warp:
    def __init__(self, program: _Program, starts: float):
        self.program, self.at, self.ready, self.barriers = program, 0, starts, 0
        self.boards = [0.0] * 6  # When each is free.
        self.copied, self.groups = 0.0, []  # When copies are there.


def cycles(
    program: list[GPUInstruction], warps: int, count: int, at_once: int, chip: GPU
) -> float:
    """Of a core that has so many programs of some warps to run, instructions as they
    are issued. It starts the next one when one is done."""
    steps = [_step(x, chip) for x in program]
    schedulers: list[list[_Warp]] = [[], [], [], []]

    def start(now: float) -> None:
        new = _Program(warps)
        for i in range(warps):  # The youngest first.
            schedulers[i % 4].insert(0, _Warp(new, now))

    started = min(at_once, count)
    for _ in range(started):
        start(0.0)
    last: list[_Warp | None] = [None] * 4
    free: dict[tuple[str, int], float] = {}
    now = 0.0
    while any(schedulers):
        soonest = math.inf
        for i, mine in enumerate(schedulers):
            chosen, before = None, last[i]
            for warp in mine if before is None else [before, *mine]:
                at = _earliest(warp, steps[warp.at], i, free)
                if at <= now:
                    chosen = warp
                    break
                soonest = min(soonest, at)
            if chosen is None:
                continue
            soonest = now + 1
            step = steps[chosen.at]
            _issue(chosen, step, i, now, free)
            last[i] = None if step.yields else chosen
            if chosen.at == len(steps):
                mine.remove(chosen)
                last[i] = None
                chosen.program.warps -= 1
                if not chosen.program.warps and started < count:
                    started += 1
                    start(now + _started)
        now = soonest
    return now


def _earliest(warp: _Warp, step: _Step, scheduler: int, free: dict) -> float:
    """When a warp may issue its next instruction, as far as is known."""
    program = warp.program
    if warp.barriers > program.passed:
        return math.inf
    at = max(warp.ready, program.opened)
    for board in step.waits:
        at = max(at, warp.boards[board])
    if step.kind == "DEPBAR":
        pending = warp.groups[: len(warp.groups) - step.left]
        at = max(at, *pending) if pending else at
    unit = step.use.unit
    if unit:
        key = unit, -1 if unit == "shared" else scheduler
        # A few loads are queued.
        at = max(at, free.get(key, 0.0) - (16 if unit == "shared" else 0))
    return at


def _issue(warp: _Warp, step: _Step, scheduler: int, now: float, free: dict) -> None:
    starts = now
    if step.use.unit:
        key = step.use.unit, -1 if step.use.unit == "shared" else scheduler
        starts = max(now, free.get(key, 0.0))
        free[key] = starts + step.use.cycles
    if step.writes is not None:
        warp.boards[step.writes] = max(warp.boards[step.writes], starts + step.latency)
    if step.reads is not None:
        done = starts + _read + step.use.cycles
        warp.boards[step.reads] = max(warp.boards[step.reads], done)
    if step.kind == "LDGSTS":
        # Not always as long, or programs would stay in step.
        free["late", 0] = (free.get(("late", 0), 0) * 1103 + 12347) % 65521
        late = free["late", 0] % _copied
        warp.copied = max(warp.copied, starts + step.latency + late)
    if step.kind == "LDGDEPBAR":
        warp.boards[0] = 0.0  # Counted by groups.
        warp.groups.append(max(warp.copied, *warp.groups[-1:], now))
        del warp.groups[:-16]
    if step.kind == "BAR":
        warp.barriers += 1
        warp.program.arrive(now)
    warp.at += 1
    warp.ready = now + step.stall + (_taken if step.kind == "BRA" else 0)


def seconds(
    kernel: GPUKernel, warps: int, dynamic: int, steps: int, tiles: int, chip: GPU
) -> float:
    """Of a kernel that has one loop of so many steps in each of its programs, one for
    each of `tiles`; a launch asks for `dynamic` bytes of shared memory. By the cores
    that have the most of them."""
    listed = kernel.listed
    start, stop = max(kernel.places_of_loops, key=lambda x: x[1] - x[0])
    end = next(i for i, x in enumerate(listed) if x.name == "EXIT" and i >= stop)
    program = [*listed[:start], *listed[start:stop] * steps, *listed[stop:end]]
    at_once = resident(kernel, warps, dynamic, chip)
    count = -(-tiles // chip.cores)
    run = lambda count: cycles(program, warps, count, at_once, chip)
    # Rounds are alike: what one more takes counts as often as there are more.
    few = (count - 1) % at_once + 1 + 2 * at_once
    if count <= few + at_once:
        return run(count) / chip.clock
    rounds = (count - few) // at_once
    return (run(few) + (run(few) - run(few - at_once)) * rounds) / chip.clock


def resident(kernel: GPUKernel, warps: int, dynamic: int, chip: GPU) -> int:
    """Programs that a core has at once."""
    threads = 32 * warps
    registers = -(-kernel.registers // 8) * 8 * threads
    return min(
        chip.registers // registers,
        chip.threads // threads,
        chip.shared // (kernel.shared + dynamic + 1024),
    )
