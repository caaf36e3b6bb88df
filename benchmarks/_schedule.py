"""What the compiler for TPUs makes of a kernel: its schedule, and the time it implies.

libtpu writes down the instructions of a kernel (see `_bundles.py`). Not among them, and
added here, are the cycles for which the matrix units are busy, and the transfers
between memory and the core.
"""

import contextlib
import dataclasses
import glob
import itertools
import math
import os
import re
import tempfile

import _bundles
import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu


_dump = tempfile.mkdtemp(prefix="schedule")
# Read once, when libtpu is loaded.
os.environ["LIBTPU_INIT_ARGS"] = (
    f"--xla_jf_dump_to={_dump} --xla_jf_dump_llo_text=true "
    "--xla_jf_emit_annotations=true --xla_jf_debug_level=2 "
    "--xla_jf_dump_llo_pass_label_regex=final.*|pre-finalize.*"
)


@dataclasses.dataclass(frozen=True)
class Device:
    """What JAX has as one device: a chip, or one core of it. Matrix units and cycles
    are those of one core; these are of one instruction on one unit."""

    hertz: float
    bytes_per_second: float
    matrix_units: int
    macs_per_cycle: int
    matmul_cycles: float
    push_cycles: float
    cores: int = 1

    @property
    def bytes_per_cycle(self) -> float:
        """Of one core, if all are at it."""
        return self.bytes_per_second / self.hertz / self.cores

    def one_core(self) -> "Device":
        """The same, where the others have nothing to do."""
        half = self.bytes_per_second / self.cores
        return dataclasses.replace(self, cores=1, bytes_per_second=half)

    def roofline(self, moved: float, macs: float) -> float:
        """The least seconds for so many bytes and multiplications."""
        multiplying = macs / (self.macs_per_cycle * self.cores) / self.hertz
        return max(moved / self.bytes_per_second, multiplying)


DEVICES = {
    "v4": Device(1.05e9, 1228e9 / 2, 4, 4 * 128**2, 16, 8),
    "v5e": Device(1.50e9, 819e9, 4, 4 * 128**2, 16, 4),
    "v5p": Device(1.75e9, 2765e9, 4, 4 * 128**2, 16, 4, cores=2),
    "v6e": Device(1.75e9, 1640e9, 2, 2 * 256**2 * 2, 8, 4),
    "TPU7x": Device(2.20e9, 7370e9 / 2, 2, 2 * 256**2 * 2, 8, 4),
}
_launch_cycles = 1500


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Cycles are those of a step. What limits it is `"transfer"`, `"matrix"`, or for
    instructions the unit that has most to do, and in which share of the cycles. `other`
    is what of the seconds is spent outside of the kernel; `temporary` what memory is
    needed beside the arguments and the result, in bytes."""

    steps: int
    step_cycles: float
    matrix_cycles: float
    transfer_cycles: float
    bytes_moved: float
    seconds: float
    limit: str
    other: float = 0
    temporary: int = 0


def _pallas_calls(jaxpr) -> list:
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            found.append(eqn)
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns") and eqn.primitive.name != "pallas_call":
                found += _pallas_calls(inner)
    return found


def _moves(index, grid) -> int:
    """How often a block moves, by the pipeline of a kernel: when its index changes."""
    last, moves = None, 0
    for step in itertools.product(*map(range, grid)):
        now = index(*step)
        moves += now != last
        last = now
    return moves


def _bytes(dtype) -> float:
    """Of one number in memory, where those of 4 bits are packed."""
    kind = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return kind(dtype).bits / 8


def bytes_moved(eqn, kept=(), results: bool = True) -> float:
    """By the pipeline of a kernel, without what it gets for the operands `kept`, and
    with what it does for the results, or without."""
    mapping = eqn.params["grid_mapping"]
    total = 0
    count = None if results else mapping.num_inputs
    for i, block in enumerate(mapping.block_mappings[:count]):
        if i in kept:
            continue
        shape = [getattr(size, "block_size", size) for size in block.block_shape]
        size = math.prod(s for s in shape if isinstance(s, int))
        closed = block.index_map_jaxpr

        def index(*step, closed=closed):
            args = [jnp.int32(i) for i in step]
            return [
                int(i) for i in jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
            ]

        moved = _moves(index, mapping.grid) * size
        total += moved * _bytes(block.array_aval.dtype)
    return total


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """Of a kernel that has its loop inside, by `pltpu.emit_pipeline`."""

    grid: tuple[int, ...]
    bytes_moved: float
    is_split: bool  # Over cores.


# What `emit_pipeline` calls the axis of a grid that cores share.
_core_axes = ("core_axis", "core_axis_name")


@contextlib.contextmanager
def _pipelines():
    """A list that has all of them which are traced meanwhile."""
    found: list[_Pipeline] = []
    emit = pltpu.emit_pipeline

    def spy(body, *, grid, in_specs, out_specs, **options):
        run = emit(body, grid=grid, in_specs=in_specs, out_specs=out_specs, **options)
        specs = [*jax.tree.leaves(in_specs), *jax.tree.leaves(out_specs)]

        def recorded(*refs, **more):
            moved = sum(
                _moves(spec.index_map, grid)
                * math.prod(spec.block_shape)
                * _bytes(ref.dtype)
                for spec, ref in zip(specs, refs, strict=True)
            )
            is_split = any(options.get(name) is not None for name in _core_axes)
            found.append(_Pipeline(grid, moved, is_split))
            return run(*refs, **more)

        return recorded

    pltpu.emit_pipeline = spy
    try:
        yield found
    finally:
        pltpu.emit_pipeline = emit


def _seconds(
    name: str, grid, moved: float, files: list[str], device: Device
) -> Estimate:
    """Of one kernel of a program. Cores share its steps; each begins with the first
    transfer, and with what is done once."""

    def path(ending: str) -> str:
        found = [
            file
            for file in files
            if re.search(rf"-{re.escape(name)}[.\d]*-\d+-{ending}\.txt$", file)
        ]
        return os.path.join(_dump, found[-1])

    count = _bundles.count(
        path("final_bundles"), path("final_hlo-static-per-bundle-utilization")
    )
    products = count.products * device.matmul_cycles
    pushes = count.pushes * device.push_cycles
    matrix = max(products, pushes) / device.matrix_units
    steps = math.prod(grid)
    transfer = moved / steps / device.bytes_per_cycle
    longest = max(count.step, matrix, transfer)
    limit = {transfer: "transfer", matrix: "matrix"}.get(longest, count.busiest)
    total = longest * math.ceil(steps / device.cores)
    total += count.rare + transfer + _launch_cycles
    return Estimate(
        steps, count.step, matrix, transfer, moved, total / device.hertz, limit
    )


def _is_kept(operand: str, text: str) -> bool:
    """Whether it was made in vector memory, by what has been counted. What is fetched
    ahead, by `copy-done`, has not."""
    made = re.search(rf"{re.escape(operand)} = (.*?) ([a-z-]+)\((%[^,)]*)?", text)
    assert made is not None
    if made[2] in ("bitcast", "get-tuple-element"):
        return "S(1)" in made[1] and _is_kept(made[3], text)
    return "S(1)" in made[1] and made[2] != "copy-done"


def _seconds_of_call(eqn, text: str, files: list[str], device: Device) -> Estimate:
    name = eqn.params["name"] or str(eqn.params["name_and_src_info"].name)
    # What the compiler keeps in vector memory, S(1), does not come from the other.
    call = re.search(rf"%{re.escape(name)}[.\d]* = (.*?) custom-call\((.*?)\)", text)
    assert call is not None
    operands = re.findall(r"%[^\s,]+", call[2])
    kept = [i for i, operand in enumerate(operands) if _is_kept(operand, text)]
    moved = bytes_moved(eqn, kept, results="S(1)" not in call[1])
    return _seconds(name, eqn.params["grid_mapping"].grid, moved, files, device)


def _cycles_around(text: str) -> int:
    """What the compiler itself expects of the other operations of a program."""
    entry = text[text.index("ENTRY ") :]
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', entry)))


def estimate(fn, *args, chip: str, compile) -> Estimate:
    """Of a function compiled by `compile`: of that of its Pallas kernels which takes
    longest, with the time of all of them and of what else is done. Without kernels that
    is what the compiler expects."""
    before = set(os.listdir(_dump))
    jaxprs, pipelines = [], []

    def spy(*traced):
        with _pipelines() as found:
            # Here the chip is known. Not `fn` itself: JAX keeps what it has traced, and
            # the table of the chip may have changed.
            jaxprs.append(jax.make_jaxpr(lambda *args: fn(*args))(*args))
        pipelines.extend(found)
        return fn(*traced)

    try:
        compiled = compile(spy, *args, chip=chip)
        files = sorted(set(os.listdir(_dump)) - before)
        device = DEVICES[chip]
        text = compiled.as_text()
        around = _cycles_around(text) / device.hertz
        temporary = compiled.memory_analysis().temp_size_in_bytes
        if pipelines:
            # There is one, in one kernel, which JAX has not given a name.
            (pipeline,) = pipelines
            custom = r'%(\S+) = .*custom_call_target="tpu_custom_call"'
            (name,) = re.findall(custom, text)
            if not pipeline.is_split and device.cores > 1:
                device = device.one_core()
            grid, moved = pipeline.grid, pipeline.bytes_moved
            kernels = [_seconds(name, grid, moved, files, device)]
        else:
            calls = _pallas_calls(jaxprs[0].jaxpr)
            kernels = [_seconds_of_call(eqn, text, files, device) for eqn in calls]
    finally:
        for file in glob.glob(os.path.join(_dump, "*")):
            os.remove(file)
    kernels = kernels or [Estimate(1, 0, 0, 0, 0, 0, "")]
    longest = max(kernels, key=lambda kernel: kernel.seconds)
    seconds = sum(kernel.seconds for kernel in kernels) + around
    other = seconds - longest.seconds
    return dataclasses.replace(
        longest, seconds=seconds, other=other, temporary=temporary
    )
