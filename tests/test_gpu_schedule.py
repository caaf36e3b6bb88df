"""Test the simulated schedule of Ampere kernels against loops counted by hand."""

from types import SimpleNamespace

import pytest
from eqquant._jax import gpus
from helpers import load_benchmark


Instruction = load_benchmark("_gpu_sass").Instruction
A100 = gpus["a100"]


@pytest.fixture
def schedule():
    return load_benchmark("_gpu_schedule")


def instruction(name, operands="", stall=1, writes=None, waits=(), reads=None):
    return Instruction(name, operands, stall, False, writes, reads, waits)


MULTIPLY = instruction("HMMA.16816.F32.BF16")


@pytest.mark.parametrize(
    "repeated, warps, expected",
    [
        (MULTIPLY, 1, 8),  # 2048 products at a quarter of 1024 products per cycle.
        (MULTIPLY, 4, 8),  # Each warp has its own scheduler.
        (MULTIPLY, 8, 16),
        (instruction("IMMA.16832.S8.S8.SAT"), 4, 8),
        (instruction("FFMA"), 4, 2),
        (instruction("LOP3.LUT"), 8, 4),
        (instruction("LOP3.LUT", stall=6), 4, 6),
        (instruction("I2F"), 4, 8),
        (instruction("LDS"), 4, 4),  # All schedulers share one load per cycle.
        (instruction("LDSM.16.M88.4"), 4, 16),
        (instruction("UIADD3"), 8, 2),
    ],
)
def test_throughput_of_units(repeated, warps, expected, schedule):
    run = lambda n: schedule.cycles([repeated] * n, warps, 1, 1, A100)
    assert run(160) - run(80) == 80 * expected


def test_ada_multiplies_int8_four_times_as_fast(schedule):
    names = "HMMA.16816.F32.BF16", "IMMA.16832.S8.S8.SAT"
    uses = [schedule.use_of(name, gpus["rtx4090"]) for name in names]
    assert uses == [("tensor", 32), ("tensor", 16)]


def test_scoreboards_delay_dependent_instructions(schedule):
    load = instruction("LDS", writes=2)
    alone = schedule.cycles([load, instruction("FFMA")], 1, 1, 1, A100)
    waiting = schedule.cycles([load, instruction("FFMA", waits=(2,))], 1, 1, 1, A100)
    other = schedule.cycles([load, instruction("FFMA", waits=(3,))], 1, 1, 1, A100)
    assert alone == other == 2 and waiting == 25
    read = instruction("STS", reads=2)
    assert schedule.cycles([read, instruction("MOV", waits=(2,))], 1, 1, 1, A100) == 14


def test_programs_overlap(schedule):
    decode = [
        instruction("LOP3.LUT", stall=80),
        MULTIPLY,
        MULTIPLY,
        instruction("NOP", stall=8),
    ]
    times = [schedule.cycles(decode * 50, 4, n, n, A100) for n in (1, 2, 5)]
    alone, two, five = times
    assert alone == pytest.approx(50 * 97, rel=0.02)
    assert two < 1.1 * alone and five < 1.3 * alone
    # Without overlap, the start of a program adds a pause.
    sequential = schedule.cycles(decode * 50, 4, 2, 1, A100)
    assert 2 * alone < sequential < 2 * alone + 600


def test_barrier_waits_for_the_slowest_warp(schedule):
    late = [instruction("LDS") for _ in range(100)]
    barrier = instruction("BAR.SYNC", "0x0")
    program = [*late, barrier, MULTIPLY]
    # Four warps load 400 times in total before any warp multiplies.
    assert schedule.cycles(program, 4, 1, 1, A100) > 390
    # With more warps than schedulers, all warps must arrive before one continues.
    assert schedule.cycles([barrier] * 3, 8, 1, 1, A100) >= 20


def test_depbar_waits_for_groups_of_copies(schedule):
    copy = [instruction("LDGSTS.E.BYPASS.128"), instruction("LDGDEPBAR", writes=0)]
    ends = lambda pending: [instruction("DEPBAR.LE", f"SB0, {pending:#x}"), MULTIPLY]
    run = lambda pending: schedule.cycles([*copy * 2, *ends(pending)], 1, 1, 1, A100)
    wait_0, wait_1, wait_2 = run(2), run(1), run(0)
    assert wait_0 < 30 and 600 < wait_1 <= wait_2 < 1200


def test_seconds_extrapolates_rounds(schedule, monkeypatch):
    loop = [
        instruction("LDSM.16.M88.4", writes=0),
        instruction("HMMA.16816.F32", waits=(0,), stall=40),
    ]
    jump = instruction("BRA", "`(.L_x_0)", stall=5)
    listed = [
        instruction("S2R", writes=1),
        *loop,
        jump,
        instruction("STG", waits=(1,)),
        instruction("EXIT"),
    ]
    monkeypatch.setattr(schedule, "instructions_in", lambda kernel: listed)
    monkeypatch.setattr(schedule, "loop_ranges", lambda kernel: [(1, 4)])
    kernel = SimpleNamespace(registers=200, shared=0)
    assert schedule.resident(kernel, 4, 0, A100) == 2
    assert schedule.resident(kernel, 4, 100_000, A100) == 1
    run = lambda tiles: schedule.seconds(kernel, 4, 0, 20, tiles, A100)
    cores, program = A100.cores, [listed[0], *listed[1:4] * 20, listed[4]]
    whole = schedule.cycles(program, 4, 17, 2, A100) / A100.clock
    assert run(17 * cores) == pytest.approx(whole, rel=0.03)
    assert run(16 * cores + 1) == run(17 * cores) > run(16 * cores)
