"""The estimate of how long a kernel of Ampere takes: loops that are counted by hand."""

import importlib
import pathlib
from types import SimpleNamespace

import pytest
from eqquant._jax import gpus
from eqquant.debug import GPUInstruction


BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
A100 = gpus["a100"]


@pytest.fixture
def schedule(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("_gpu_schedule")


def one(name, operands="", stall=1, writes=None, waits=(), reads=None):
    return GPUInstruction(name, operands, stall, False, writes, reads, waits)


MULTIPLY = one("HMMA.16816.F32.BF16")


@pytest.mark.parametrize(
    "what, warps, each",
    [
        (MULTIPLY, 1, 8),  # A quarter of 1024 products a cycle, of 2048.
        (MULTIPLY, 4, 8),  # Each warp has its scheduler.
        (MULTIPLY, 8, 16),
        (one("IMMA.16832.S8.S8.SAT"), 4, 8),
        (one("FFMA"), 4, 2),
        (one("LOP3.LUT"), 8, 4),
        (one("LOP3.LUT", stall=6), 4, 6),
        (one("I2F"), 4, 8),
        (one("LDS"), 4, 4),  # Of 128 bytes, for one of all schedulers a cycle.
        (one("LDSM.16.M88.4"), 4, 16),
        (one("UIADD3"), 8, 2),
    ],
)
def test_units_are_busy(what, warps, each, schedule):
    run = lambda n: schedule.cycles([what] * n, warps, 1, 1, A100)
    assert run(160) - run(80) == 80 * each


def test_ada_multiplies_integers_four_times_as_fast(schedule):
    names = "HMMA.16816.F32.BF16", "IMMA.16832.S8.S8.SAT"
    uses = [schedule.use_of(name, gpus["rtx4090"]) for name in names]
    assert uses == [("tensor", 32), ("tensor", 16)]


def test_results_are_waited_for(schedule):
    load = one("LDS", writes=2)
    alone = schedule.cycles([load, one("FFMA")], 1, 1, 1, A100)
    waiting = schedule.cycles([load, one("FFMA", waits=(2,))], 1, 1, 1, A100)
    other = schedule.cycles([load, one("FFMA", waits=(3,))], 1, 1, 1, A100)
    assert alone == other == 2 and waiting == 25
    read = one("STS", reads=2)
    assert schedule.cycles([read, one("MOV", waits=(2,))], 1, 1, 1, A100) == 14


def test_another_program_multiplies_meanwhile(schedule):
    decode = [one("LOP3.LUT", stall=80), MULTIPLY, MULTIPLY, one("NOP", stall=8)]
    times = [schedule.cycles(decode * 50, 4, n, n, A100) for n in (1, 2, 5)]
    alone, two, five = times
    assert alone == pytest.approx(50 * 97, rel=0.02)
    assert two < 1.1 * alone and five < 1.3 * alone
    # One after the other, with a pause between.
    apart = schedule.cycles(decode * 50, 4, 2, 1, A100)
    assert 2 * alone < apart < 2 * alone + 600


def test_a_barrier_waits_for_the_slowest_warp_of_its_program(schedule):
    late = [one("LDS") for _ in range(100)]
    barrier = one("BAR.SYNC", "0x0")
    program = [*late, barrier, MULTIPLY]
    # Four warps load 400 times before any of them multiplies.
    assert schedule.cycles(program, 4, 1, 1, A100) > 390
    # More warps: none is done before all are there.
    assert schedule.cycles([barrier] * 3, 8, 1, 1, A100) >= 20


def test_copies_are_waited_for_by_group(schedule):
    copy = [one("LDGSTS.E.BYPASS.128"), one("LDGDEPBAR", writes=0)]
    ends = lambda left: [one("DEPBAR.LE", f"SB0, {left:#x}"), MULTIPLY]
    run = lambda left: schedule.cycles([*copy * 2, *ends(left)], 1, 1, 1, A100)
    none, first, all = run(2), run(1), run(0)
    assert none < 30 and 600 < first <= all < 1200


def test_rounds_of_a_kernel(schedule, monkeypatch):
    """Many tiles by a few of them, and the last ones by themselves."""
    loop = [one("LDSM.16.M88.4", writes=0), one("HMMA.16816.F32", waits=(0,), stall=40)]
    jump = one("BRA", "`(.L_x_0)", stall=5)
    listed = [one("S2R", writes=1), *loop, jump, one("STG", waits=(1,)), one("EXIT")]
    kernel = SimpleNamespace(
        listed=listed, places_of_loops=[(1, 4)], registers=200, shared=0
    )
    assert schedule.resident(kernel, 4, 0, A100) == 2
    assert schedule.resident(kernel, 4, 100_000, A100) == 1
    run = lambda tiles: schedule.seconds(kernel, 4, 0, 20, tiles, A100)
    cores, program = A100.cores, [listed[0], *listed[1:4] * 20, listed[4]]
    whole = schedule.cycles(program, 4, 17, 2, A100) / A100.clock
    assert run(17 * cores) == pytest.approx(whole, rel=0.03)
    assert run(16 * cores + 1) == run(17 * cores) > run(16 * cores)
