"""Estimate the run time of TPU kernels from the schedule that libtpu compiles.

libtpu dumps the instructions of a kernel, which `_tpu_bundles.py` counts. The dump does
not contain the cycles for which the matrix units are busy, or the transfers between
memory and the core. This module adds both.
"""

import contextlib
import dataclasses
import glob
import itertools
import math
import os
import re
import tempfile

import _tpu_bundles
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


_dump = tempfile.mkdtemp(prefix="schedule")
# libtpu reads this variable once, when it is loaded.
os.environ["LIBTPU_INIT_ARGS"] = (
    f"--xla_jf_dump_to={_dump} --xla_jf_dump_llo_text=true "
    "--xla_jf_emit_annotations=true --xla_jf_debug_level=2 "
    "--xla_jf_dump_llo_pass_label_regex=final.*|pre-finalize.*"
)


@dataclasses.dataclass(frozen=True)
class Device:
    """The rates of one JAX device, which is a chip or one of its cores.

    `matrix_units` counts the units of one core. `matmul_cycles` and `push_cycles` are
    the cycles that one instruction occupies one matrix unit.
    """

    hertz: float
    bytes_per_second: float
    matrix_units: int
    macs_per_cycle: int
    matmul_cycles: float
    push_cycles: float
    cores: int = 1

    @property
    def bytes_per_cycle(self) -> float:
        """The bandwidth of one core while all cores transfer."""
        return self.bytes_per_second / self.hertz / self.cores

    def one_core(self) -> "Device":
        """Return this device with one active core and its share of the bandwidth."""
        bandwidth = self.bytes_per_second / self.cores
        return dataclasses.replace(self, cores=1, bytes_per_second=bandwidth)

    def roofline(self, moved: float, macs: float) -> float:
        """Return the lower bound in seconds for `moved` bytes and `macs` operations."""
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
    """The estimated time of a program.

    Cycles are cycles of one step of its longest kernel. `limit` is `"transfer"`,
    `"matrix"`, or the busiest unit and its utilization if instructions are the limit.
    `other` is the part of `seconds` outside that kernel. `temporary` is the size in
    bytes of temporary arrays.
    """

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
    """Count the transfers of a block: a pipeline moves it when its index changes."""
    previous, moves = None, 0
    for step in itertools.product(*map(range, grid)):
        current = index(*step)
        moves += current != previous
        previous = current
    return moves


def _bytes(dtype) -> float:
    """Return the bytes of one number in memory, where 4-bit numbers are packed."""
    kind = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return kind(dtype).bits / 8


def bytes_moved(eqn, kept=(), results: bool = True) -> float:
    """Return the bytes that the pipeline of a kernel moves.

    The operands at the positions `kept` do not count. Results count only if `results`.
    """
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
    """A loop inside a kernel, made by `pltpu.emit_pipeline`."""

    grid: tuple[int, ...]
    bytes_moved: float
    is_split: bool  # True if the cores share the steps.


# The options of `emit_pipeline` that name the grid axis which cores share.
_core_axes = ("core_axis", "core_axis_name")


@contextlib.contextmanager
def _pipelines():
    """Record in a list every pipeline that is traced inside the context."""
    found: list[_Pipeline] = []
    emit = pltpu.emit_pipeline

    def spy(body, *, grid, in_specs, out_specs, **options):
        run = emit(body, grid=grid, in_specs=in_specs, out_specs=out_specs, **options)
        specs = [*jax.tree.leaves(in_specs), *jax.tree.leaves(out_specs)]

        def recorded(*refs, **kwargs):
            moved = sum(
                _moves(spec.index_map, grid)
                * math.prod(spec.block_shape)
                * _bytes(ref.dtype)
                for spec, ref in zip(specs, refs, strict=True)
            )
            is_split = any(options.get(name) is not None for name in _core_axes)
            found.append(_Pipeline(grid, moved, is_split))
            return run(*refs, **kwargs)

        return recorded

    pltpu.emit_pipeline = spy
    try:
        yield found
    finally:
        pltpu.emit_pipeline = emit


def _seconds(
    name: str, grid, moved: float, files: list[str], device: Device
) -> Estimate:
    """Estimate one kernel of a program.

    Cores share its steps. Each core begins with the first transfer and with the bundles
    that only some steps execute.
    """

    def path(ending: str) -> str:
        found = [
            file
            for file in files
            if re.search(rf"-{re.escape(name)}[.\d]*-\d+-{ending}\.txt$", file)
        ]
        return os.path.join(_dump, found[-1])

    count = _tpu_bundles.count(
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
    """Check whether an operand already is in vector memory and costs no transfer.

    A prefetched operand, which `copy-done` produces, does cost a transfer.
    """
    made = re.search(rf"{re.escape(operand)} = (.*?) ([a-z-]+)\((%[^,)]*)?", text)
    assert made is not None
    if made[2] in ("bitcast", "get-tuple-element"):
        return "S(1)" in made[1] and _is_kept(made[3], text)
    return "S(1)" in made[1] and made[2] != "copy-done"


@contextlib.contextmanager
def _kernels():
    """Record in a list the equations of kernels in the lowerings of primitives, which
    are traced inside the context."""
    found: list = []
    pallas_call = pl.pallas_call

    def spy(*args, **options):
        run = pallas_call(*args, **options)

        def recorded(*operands):
            of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
            found.extend(_pallas_calls(jax.make_jaxpr(run)(*map(of, operands)).jaxpr))
            return run(*operands)

        return recorded

    pl.pallas_call = spy
    try:
        yield found
    finally:
        pl.pallas_call = pallas_call


def _seconds_of_calls(
    eqns: list, text: str, files: list[str], device: Device
) -> list[Estimate]:
    """Estimate each call of a kernel in the text of a program."""
    call = (
        r"%(\S+) = (.*?) custom-call\((.*?)\), "
        r'custom_call_target="tpu_custom_call", '
        r"operand_layout_constraints=(.*?), [a-z_]+="
    )
    calls = re.findall(call, text)

    def kind(name: str, results: str, _: str, types: str):
        """The name of the kernel, and the shapes of results and operands."""
        return re.sub(r"[.\d]+$", "", name), _shapes(f"{results} {types}")

    # The compiler dumps one of several equal kernels.
    dumped = {
        kind(*call): call[0]
        for call in calls
        if any(f"-{call[0]}-" in file for file in files)
    }
    by_kind = {}
    for eqn in eqns:
        shapes = [x.aval.shape for x in (*eqn.outvars, *eqn.invars)]
        name = eqn.params["name"] or str(eqn.params["name_and_src_info"].name)
        by_kind[name, tuple(shapes)] = eqn
    estimates = []
    for call in calls:
        _, results, operands, _ = call
        names = re.findall(r"%[^\s,]+", operands)
        # Arrays in vector memory, S(1), are not transferred from HBM.
        kept = [_is_kept(operand, text) for operand in names]
        kept += ["S(1)" in result for result in re.findall(r"\w+\[[^ ]*", results)]
        eqn = by_kind[kind(*call)]
        moved = bytes_moved(eqn, [i for i, is_kept in enumerate(kept) if is_kept])
        grid = eqn.params["grid_mapping"].grid
        estimates.append(_seconds(dumped[kind(*call)], grid, moved, files, device))
    return estimates


def _shapes(types: str) -> tuple[tuple[int, ...], ...]:
    found = re.findall(r"\b[a-z]+\d+\[([\d,]*)\]", types)
    return tuple(tuple(map(int, filter(None, x.split(",")))) for x in found)


def _cycles_around(text: str) -> int:
    """Sum the compiler's own estimates for the other operations of a program."""
    entry = text[text.index("ENTRY ") :]
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', entry)))


def estimate(fn, *args, chip: str, compile) -> Estimate:
    """Estimate a function that `compile` compiles for a chip.

    The result describes the longest Pallas kernel of the program; its `seconds` cover
    all kernels and all other operations. A program without kernels gets the compiler's
    own estimate.
    """
    before = set(os.listdir(_dump))
    pipelines = []

    def spy(*traced):
        with _pipelines() as found:
            # Trace here, where the chip is set. Wrap `fn`, because JAX caches traces
            # by function and the table of the chip may have changed.
            traced_fn = jax.make_jaxpr(lambda *args: fn(*args))(*args)
        eqns.extend(_pallas_calls(traced_fn.jaxpr))
        pipelines.extend(found)
        return fn(*traced)

    try:
        with _kernels() as eqns:
            compiled = compile(spy, *args, chip=chip)
        files = sorted(set(os.listdir(_dump)) - before)
        device = DEVICES[chip]
        text = compiled.as_text()
        around = _cycles_around(text) / device.hertz
        temporary = compiled.memory_analysis().temp_size_in_bytes
        if pipelines:
            # There is exactly one pipeline, in one kernel, and JAX has not named it.
            (pipeline,) = pipelines
            custom = r'%(\S+) = .*custom_call_target="tpu_custom_call"'
            (name,) = re.findall(custom, text)
            if not pipeline.is_split and device.cores > 1:
                device = device.one_core()
            grid, moved = pipeline.grid, pipeline.bytes_moved
            kernels = [_seconds(name, grid, moved, files, device)]
        else:
            kernels = _seconds_of_calls(eqns, text, files, device)
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
