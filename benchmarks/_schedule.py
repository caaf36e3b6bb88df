"""What the compiler for TPUs makes of a kernel: its schedule, and the time it implies.

libtpu writes down the instructions of a kernel, bundle by bundle: a bundle is what a
core issues in one cycle. Not in the schedule, and added here, are the cycles for which
the matrix units are busy, and the transfers between memory and the core.
"""

import dataclasses
import glob
import itertools
import math
import os
import re
import tempfile

import jax
import jax.numpy as jnp


_dump = tempfile.mkdtemp(prefix="schedule")
# Read once, when libtpu is loaded.
os.environ["LIBTPU_INIT_ARGS"] = (
    f"--xla_jf_dump_to={_dump} --xla_jf_dump_llo_text=true "
    "--xla_jf_emit_annotations=true --xla_jf_debug_level=2 "
    "--xla_jf_dump_llo_pass_label_regex=final.*|pre-finalize.*"
)


@dataclasses.dataclass(frozen=True)
class Core:
    """One core of a chip. Cycles are those of one instruction on one unit."""

    hertz: float
    bytes_per_second: float
    matrix_units: int
    macs_per_cycle: int
    matmul_cycles: float
    push_cycles: float

    @property
    def bytes_per_cycle(self) -> float:
        return self.bytes_per_second / self.hertz


CORES = {
    "v4": Core(1.05e9, 1228e9 / 2, 4, 4 * 128**2, 16, 8),
    "v5e": Core(1.50e9, 819e9, 4, 4 * 128**2, 16, 4),
    "v5p": Core(1.75e9, 2765e9 / 2, 4, 4 * 128**2, 16, 4),
    "v6e": Core(1.75e9, 1640e9, 2, 2 * 256**2 * 2, 8, 4),
    "TPU7x": Core(2.20e9, 7370e9 / 2, 2, 2 * 256**2 * 2, 8, 4),
}
_launch_cycles = 1500


@dataclasses.dataclass(frozen=True)
class Estimate:
    steps: int
    step_cycles: float
    matrix_cycles: float
    transfer_cycles: float
    bytes_moved: float
    seconds: float


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


def bytes_moved(eqn, results: bool = True) -> float:
    """By the pipeline of a kernel: a block moves when its index changes. With those of
    the results, or without."""
    mapping = eqn.params["grid_mapping"]
    total = 0
    count = None if results else mapping.num_inputs
    for block in mapping.block_mappings[:count]:
        shape = [getattr(size, "block_size", size) for size in block.block_shape]
        dtype = block.array_aval.dtype
        size = math.prod(s for s in shape if isinstance(s, int))
        index = block.index_map_jaxpr
        last, moves = None, 0
        for step in itertools.product(*map(range, mapping.grid)):
            args = [jnp.int32(i) for i in step]
            now = tuple(
                int(i) for i in jax.core.eval_jaxpr(index.jaxpr, index.consts, *args)
            )
            moves += now != last
            last = now
        total += moves * size * dtype.itemsize
    return total


_bundle = re.compile(r"^\s*(?:0x[0-9a-f]+|\d+)\s+(?:LH|LB|LE|PB|PF|CT|)\s*:\s*[> ]*\{")
_branch = re.compile(r"sbr\.rel \(!?(%p[0-9a-z_]+)\) target = \$region(\d+)")
_region = re.compile(
    r"(?:Start/End empty regions?|Start regions?|empty region) ([0-9]+)"
)


def _read_bundles(path: str) -> list[str]:
    bundles: list[str] = []
    with open(path) as file:
        for line in file:
            if _bundle.match(line):
                bundles.append(line)
            elif bundles:
                bundles[-1] += line
    return bundles


def _count(bundles: list[str], core: Core) -> tuple[int, int, float]:
    """Cycles of a step, cycles outside of steps, and cycles of the matrix units."""
    label = {}
    for i, text in enumerate(bundles):
        for match in _region.finditer(text):
            label.setdefault(int(match[1]), i)
    loops, skips = [], []
    for i, text in enumerate(bundles):
        for match in _branch.finditer(text):
            target = label.get(int(match[2]))
            if target is not None and target <= i:
                loops.append((target, min(i + 4, len(bundles) - 1)))
            elif target is not None:
                skips.append((i + 5, target))
    start, end = max(loops, key=lambda l: l[1] - l[0], default=(0, len(bundles) - 1))

    def products(texts: list[str]) -> int:
        return sum(("vmatmul" in text) + ("vmatpush" in text) for text in texts)

    everything = products(bundles[start : end + 1])
    kept = set(range(start, end + 1))
    rare = 0
    for first, last in sorted(skips, key=lambda s: s[0] - s[1]):
        inside = start <= first < last <= end and first in kept
        # What is guarded runs on some steps only, unless it is the work itself.
        if inside and products(bundles[first:last]) < 0.3 * max(everything, 1):
            kept -= set(range(first, last))
            rare += last - first
    matmul = push = 0.0
    for i in kept:
        matmul += len(re.findall(r"\bvmatmul\S*", bundles[i])) * core.matmul_cycles
        push += len(re.findall(r"\bvmatpush\S*", bundles[i])) * core.push_cycles
    return len(kept), rare, max(matmul, push) / core.matrix_units


def _seconds(eqn, text: str, files: list[str], core: Core) -> Estimate:
    """Of one kernel of a program."""
    name = re.escape(eqn.params["name"] or str(eqn.params["name_and_src_info"].name))
    path = [
        file
        for file in files
        if re.search(rf"-{name}[.\d]*-\d+-final_bundles\.txt$", file)
    ][-1]
    cycles, rare, matrix = _count(_read_bundles(os.path.join(_dump, path)), core)
    steps = math.prod(eqn.params["grid_mapping"].grid)
    # What the compiler keeps in vector memory, S(1), is not written to the other.
    written = re.search(rf"%{name}[.\d]* = (.*?) custom-call", text)
    moved = bytes_moved(eqn, results=not (written and "S(1)" in written[1]))
    transfer = moved / steps / core.bytes_per_cycle
    total = max(cycles, matrix, transfer) * steps + rare + transfer + _launch_cycles
    return Estimate(steps, cycles, matrix, transfer, moved, total / core.hertz)


def _cycles_around(text: str) -> int:
    """What the compiler itself expects of the other operations of a program."""
    entry = text[text.index("ENTRY ") :]
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', entry)))


def estimate(fn, *args, chip: str, compile) -> Estimate:
    """Of a function compiled by `compile`: of that of its Pallas kernels which takes
    longest, with the time of all of them and of what else is done. Without kernels that
    is what the compiler expects."""
    before = set(os.listdir(_dump))
    jaxprs = []

    def spy(*traced):
        jaxprs.append(jax.make_jaxpr(fn)(*args))  # Here the chip is known.
        return fn(*traced)

    compiled = compile(spy, *args, chip=chip)
    files = sorted(set(os.listdir(_dump)) - before)
    core = CORES[chip]
    text = compiled.as_text()
    around = _cycles_around(text)
    calls = _pallas_calls(jaxprs[0].jaxpr)
    kernels = [_seconds(eqn, text, files, core) for eqn in calls]
    kernels = kernels or [Estimate(1, around, 0, 0, 0, 0)]
    for file in glob.glob(os.path.join(_dump, "*")):
        os.remove(file)
    longest = max(kernels, key=lambda kernel: kernel.seconds)
    seconds = sum(kernel.seconds for kernel in kernels)
    seconds += around / core.hertz
    return dataclasses.replace(longest, seconds=seconds)
