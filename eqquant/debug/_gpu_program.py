"""Static properties of a compiled GPU program."""

import dataclasses
import functools as ft
import importlib.util
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from typing import NamedTuple

import jax


class GPUInstruction(NamedTuple):
    """A SASS instruction with its undocumented scheduling fields.

    **Fields:**

    - `name` and `operands`, such as `"LOP3.LUT"`.
    - `stall`: the least number of cycles before the warp issues its next instruction.
    - `yields`: whether another warp should issue next.
    - `writes`, `reads`: the scoreboard, of six, that is free once the result is
        written, and once the operands are read.
    - `waits`: scoreboards that must be free before.
    """

    name: str
    operands: str
    stall: int
    yields: bool
    writes: int | None
    reads: int | None
    waits: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class GPUKernel:
    """A kernel, with its PTX and its SASS.

    **Fields:**

    - `name`: the name of its entry point.
    - `architecture`: the target, such as `"sm_90a"`.
    - `ptx`: the output of the compiler.

    `registers`, `spilled`, `shared` and `sass` run `ptxas` and `nvdisasm`, and raise a
    `RuntimeError` if these are not installed.
    """

    name: str
    architecture: str
    ptx: str = dataclasses.field(repr=False)

    @ft.cached_property
    def _assembled(self) -> tuple[str, str, str]:
        """The output of `ptxas`, and the instructions without and with their bits."""
        with tempfile.TemporaryDirectory(prefix="eqquant-") as folder:
            source, binary = (pathlib.Path(folder, x) for x in ("k.ptx", "k.cubin"))
            source.write_text(self.ptx)
            architecture = f"-arch={self.architecture}"
            said = _run("ptxas", architecture, "-v", source, "-o", binary).stderr
            disassembled = (_run("nvdisasm", "-c", *o, binary) for o in ((), ("-hex",)))
            return said, *(done.stdout for done in disassembled)

    def _said(self, pattern: str) -> int:
        found = re.search(pattern, self._assembled[0])
        return int(found[1]) if found else 0

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return self._said(r"Used (\d+) registers")

    @property
    def spilled(self) -> int:
        """Spilled bytes per thread."""
        return self._said(r"(\d+) bytes spill stores")

    @property
    def shared(self) -> int:
        """Bytes of static shared memory. A launch may add dynamic shared memory."""
        return self._said(r"(\d+) bytes smem")

    @property
    def sass(self) -> str:
        """The SASS listing."""
        return self._assembled[1]

    @property
    def instructions(self) -> list[str]:
        """The names of the instructions in order, such as `"LOP3.LUT"`."""
        return [name for _, name, _ in _instructions(self.sass)]

    @property
    def stalls(self) -> list[int]:
        """The least number of cycles after each instruction, from undocumented fields.

        Waiting for memory, tensor cores and other warps is not included.
        """
        return [x.stall for x in self.listed]

    @ft.cached_property
    def listed(self) -> list[GPUInstruction]:
        """The instructions in order, with their scheduling fields."""
        second = r"^\s+/\* 0x([0-9a-f]{16}) \*/"
        words = re.findall(second, self._assembled[2], re.M)
        named = _instructions(self.sass)
        return [
            _with_bits(name, operands, int(word, 16))
            for (_, name, operands), word in zip(named, words, strict=True)
        ]

    @property
    def loops(self) -> list[list[str]]:
        """The instructions of each loop. Outer loops include their inner loops."""
        names = self.instructions
        return [names[start:stop] for start, stop in self.places_of_loops]

    @property
    def places_of_loops(self) -> list[tuple[int, int]]:
        """The first instruction of each loop, and the instruction after its last."""
        labels: dict[str, int] = {}
        position = 0
        listed: list[tuple[int, str, str]] = []
        for line in self.sass.splitlines():
            if label := re.match(r"\s*(\.L_x_\d+):", line):
                labels[label[1]] = position
            for found in _instructions(line):
                listed.append(found)
                position += 1
        out = []
        for end, (_, name, operands) in enumerate(listed):
            target = re.search(r"\.L_x_\d+", operands)
            if name.startswith("BRA") and target:
                start = labels.get(target[0], end)
                # The last instruction is an unreachable jump to itself.
                if start < end:
                    out.append((start, end + 1))
        return out


@dataclasses.dataclass(frozen=True)
class GPUProgram:
    """The result of [`eqquant.debug.compile_for_gpu`][].

    **Fields:**

    - `compiled`: a `jax.stages.Compiled`, whose `.memory_analysis()` returns the memory
        of the program. It cannot be called.
    - `chip`: the target chip.
    - `launches`: the operations of the program on the chip, in order, one per line.
    - `kernels`: the compiled kernels, each a [`eqquant.debug.GPUKernel`][]. Kernels of
        libraries such as cuBLAS are not included.
    """

    compiled: jax.stages.Compiled = dataclasses.field(repr=False)
    chip: str
    launches: str = dataclasses.field(repr=False)
    kernels: tuple[GPUKernel, ...]

    @property
    def num_launches(self) -> int:
        """The number of launched kernels and copies. Loop bodies count once."""
        pattern = r"^\s*\d+: k(?!While|CommandBuffer|DynamicSlice)"
        return len(re.findall(pattern, self.launches, re.M))

    def as_text(self) -> str:
        """Return the optimized HLO."""
        return self.compiled.as_text() or ""


def kernels_in(texts: Iterable[str], architecture: str) -> tuple[GPUKernel, ...]:
    """Return the kernel of each entry point in each PTX module."""
    out = []
    for text in texts:
        for name in re.findall(r"\.entry\s+([\w$]+)", text):
            out.append(GPUKernel(name, architecture, text))
    return tuple(out)


def once(launches: str) -> str:
    """Drop duplicates: XLA writes some modules a second time, in groups."""
    lines = launches.splitlines()
    again = [i for i, line in enumerate(lines) if i and line == lines[0]]
    grouped = [i for i, line in enumerate(lines) if line.startswith("000: kCommand")]
    return "\n".join(lines[: min([*again, *grouped, len(lines)])])


def _instructions(sass: str) -> list[tuple[int, str, str]]:
    """Yield addresses, names and operands."""
    pattern = r"/\*([0-9a-f]{4,})\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);"
    return [(int(a, 16), name, rest) for a, name, rest in re.findall(pattern, sass)]


def _with_bits(name: str, operands: str, word: int) -> GPUInstruction:
    board = lambda at: None if (i := word >> at & 7) == 7 else i
    waits = tuple(i for i in range(6) if word >> 52 + i & 1)
    stall, yields = word >> 41 & 15, not word >> 45 & 1
    return GPUInstruction(name, operands, stall, yields, board(46), board(49), waits)


def _run(tool: str, *args) -> subprocess.CompletedProcess:
    command = [_tool(tool), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip()}")
    return done


def _tool(name: str) -> str:
    """Return the path of a tool, from NVIDIA's wheels or from the system."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(pathlib.Path(root).glob(f"*/bin/{name}")):
            return str(path)
    if path := shutil.which(name):
        return path
    raise RuntimeError(f"{name} is not installed: pip install 'eqquant[gpu-compiler]'")
