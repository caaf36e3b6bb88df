"""Estimate the cycles of an Ampere or Ada kernel from its machine code.

The model simulates the four schedulers of a core cycle by cycle. Each scheduler issues
one instruction per cycle: from the same warp as before, otherwise from the youngest
warp that is ready. A warp waits for the stall cycles and scoreboards encoded in its
instructions, for the unit that an instruction needs, for the other warps of its program
at a barrier, and for its copies from memory.

- Schedulers and instruction encoding: Huerta et al., "Dissecting and Modeling the
  Architecture of Modern GPU Cores", 2025.
- Latencies of shared memory: Sun et al., "Dissecting Tensor Cores via Microbenchmarks",
  2022. Approximate latencies of other instructions: Abdelkhalik et al., "Demystifying
  the Nvidia Ampere Architecture through Microbenchmarking and Instruction-level
  Analysis", 2022. Instructions encode the latencies of tensor cores and arithmetic.
- Throughput of units: NVIDIA's tables of arithmetic throughput, and data sheets.

The model ignores instruction caches, bank conflicts of registers and shared memory,
branches other than the jump of the loop, and the limit of memory bandwidth.
"""

import math
import re
from typing import NamedTuple

from _gpu_sass import Instruction, instructions_in, loop_ranges
from _gpu_times import rates
from eqquant._jax import GPU
from eqquant.debug import GPUKernel


# Cycles until a scoreboard is released, by the instruction that produces the result.
_latencies = {"LDSM": 33, "LDS": 24, "LDG": 500, "LDGSTS": 600, "MUFU": 30, "S2R": 30}
_default_latency = 24  # Conversions, stores.
_operand_latency = 12  # Until an instruction has read its operands.
_branch_latency = 10  # Cycles to jump back, and to leave a barrier.
_start_latency = 500  # Between two programs on the same core.
_copy_jitter = 512  # The largest random delay of a copy from memory.


class Use(NamedTuple):
    """The unit that an instruction needs, and the cycles for which it is busy.

    All schedulers share the unit `"shared"`; each has its own instance of the others.
    """

    unit: str
    cycles: float


def can_schedule(chip: GPU) -> bool:
    """Check whether the tensor cores of a chip read operands from registers.

    The model covers only these chips.
    """
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
    """Return the bytes that one thread loads or stores."""
    if name.startswith("LDSM"):
        return 4 * int(name[-1])
    wide = re.search(r"\.U?(64|128)\b", name)
    return int(wide[1]) // 8 if wide else 4


class _Step(NamedTuple):
    """An `Instruction` with its unit and latencies."""

    kind: str
    use: Use
    stall: int
    yields: bool
    writes: int | None
    reads: int | None
    waits: tuple[int, ...]
    latency: int
    pending: int  # The copies that `DEPBAR` permits to be unfinished.


def _step(x: Instruction, chip: GPU) -> _Step:
    kind = x.name.split(".")[0]
    latency = _latencies.get(kind, _default_latency)
    pending = re.search(r"SB0, 0x([0-9a-f]+)", x.operands)
    use = use_of(x.name, chip)
    if x.operands.startswith("RZ, [RZ]"):  # Padding: a no-op.
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
        pending=int(pending[1], 16) if pending else 0,
    )


class _Program:
    """The state that the warps of a program share.

    It counts the warps that wait at a barrier and the barriers that have opened, and
    stores when the last one opened.
    """

    def __init__(self, warps: int):
        self.warps, self.arrived, self.passed, self.opened = warps, 0, 0, 0.0

    def arrive(self, now: float) -> None:
        self.arrived += 1
        if self.arrived == self.warps:
            self.arrived, self.passed = 0, self.passed + 1
            self.opened = now + _branch_latency


class _Warp:
    def __init__(self, program: _Program, starts: float):
        self.program, self.at, self.ready, self.barriers = program, 0, starts, 0
        self.boards = [0.0] * 6  # The cycle in which each scoreboard is released.
        self.copied, self.groups = 0.0, []  # The cycles in which copies arrive.


def cycles(
    program: list[Instruction], warps: int, count: int, at_once: int, chip: GPU
) -> float:
    """Return the cycles in which one core runs `count` programs of `warps` warps.

    `program` lists the instructions in issue order. At most `at_once` programs are
    resident; a new program starts when one ends.
    """
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
        for i, queue in enumerate(schedulers):
            chosen, previous = None, last[i]
            for warp in queue if previous is None else [previous, *queue]:
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
                queue.remove(chosen)
                last[i] = None
                chosen.program.warps -= 1
                if not chosen.program.warps and started < count:
                    started += 1
                    start(now + _start_latency)
        now = soonest
    return now


def _earliest(warp: _Warp, step: _Step, scheduler: int, free: dict) -> float:
    """Return the earliest cycle in which a warp can issue its next instruction."""
    program = warp.program
    if warp.barriers > program.passed:
        return math.inf
    at = max(warp.ready, program.opened)
    for board in step.waits:
        at = max(at, warp.boards[board])
    if step.kind == "DEPBAR":
        awaited = warp.groups[: len(warp.groups) - step.pending]
        at = max(at, *awaited) if awaited else at
    unit = step.use.unit
    if unit:
        key = unit, -1 if unit == "shared" else scheduler
        # The queue of shared memory holds 16 cycles of loads.
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
        done = starts + _operand_latency + step.use.cycles
        warp.boards[step.reads] = max(warp.boards[step.reads], done)
    if step.kind == "LDGSTS":
        # Pseudo-random delays prevent programs from running in lockstep.
        free["late", 0] = (free.get(("late", 0), 0) * 1103 + 12347) % 65521
        late = free["late", 0] % _copy_jitter
        warp.copied = max(warp.copied, starts + step.latency + late)
    if step.kind == "LDGDEPBAR":
        warp.boards[0] = 0.0  # `warp.groups` tracks copies instead.
        warp.groups.append(max(warp.copied, *warp.groups[-1:], now))
        del warp.groups[:-16]
    if step.kind == "BAR":
        warp.barriers += 1
        warp.program.arrive(now)
    warp.at += 1
    warp.ready = now + step.stall + (_branch_latency if step.kind == "BRA" else 0)


def seconds(
    kernel: GPUKernel, warps: int, dynamic: int, steps: int, tiles: int, chip: GPU
) -> float:
    """Return the seconds of a kernel whose programs loop over `steps` steps each.

    Each of `tiles` tiles is one program. A launch allocates `dynamic` bytes of shared
    memory. The cores with the most programs determine the time.
    """
    listed = instructions_in(kernel)
    start, stop = max(loop_ranges(kernel), key=lambda x: x[1] - x[0])
    end = next(i for i, x in enumerate(listed) if x.name == "EXIT" and i >= stop)
    program = [*listed[:start], *listed[start:stop] * steps, *listed[stop:end]]
    at_once = resident(kernel, warps, dynamic, chip)
    count = -(-tiles // chip.cores)
    run = lambda count: cycles(program, warps, count, at_once, chip)
    # Simulate two to three rounds, and extrapolate: further rounds take the same time.
    simulated = (count - 1) % at_once + 1 + 2 * at_once
    if count <= simulated + at_once:
        return run(count) / chip.clock
    rounds = (count - simulated) // at_once
    round_cycles = run(simulated) - run(simulated - at_once)
    return (run(simulated) + round_cycles * rounds) / chip.clock


def resident(kernel: GPUKernel, warps: int, dynamic: int, chip: GPU) -> int:
    """Return the number of programs that are resident on a core at once."""
    threads = 32 * warps
    registers = -(-kernel.registers // 8) * 8 * threads
    return min(
        chip.registers // registers,
        chip.threads // threads,
        chip.shared // (kernel.shared + dynamic + 1024),
    )
