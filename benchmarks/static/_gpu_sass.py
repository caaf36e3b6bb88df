"""Parse SASS, the machine code of NVIDIA GPUs: instructions, their stalls, and loops.

`GPUKernel.sass` contains one line for each instruction, with the first half of its
encoding, and one line with the second half. NVIDIA does not document the encoding. The
meaning of its bits is from Huerta et al., "Dissecting and Modeling the Architecture of
Modern GPU Cores", 2025.
"""

import re
from typing import NamedTuple

from eqquant.debug import GPUKernel


_instruction = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);"
)
_label = re.compile(r"\s*(\.L_x_\d+):")
_second_half = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/", re.MULTILINE)


class Instruction(NamedTuple):
    """An instruction, and the scheduling that the assembler encodes in it.

    **Fields:**

    - `name`: the opcode with its modifiers, such as `"LOP3.LUT"`.
    - `operands`: the rest of the line.
    - `stall`: the minimum number of cycles until the warp issues its next instruction.
    - `yields`: whether the scheduler should switch to another warp.
    - `writes`: the scoreboard that is released when the result is written.
    - `reads`: the scoreboard that is released when the operands are read.
    - `waits`: the scoreboards that must be released before the instruction is issued.
    """

    name: str
    operands: str
    stall: int
    yields: bool
    writes: int | None
    reads: int | None
    waits: tuple[int, ...]


def names_in(kernel: GPUKernel) -> list[str]:
    """Return the name of each instruction."""
    return [name for name, _ in _instruction.findall(kernel.sass)]


def instructions_in(kernel: GPUKernel) -> list[Instruction]:
    """Return each instruction with its scheduling."""
    found = _instruction.findall(kernel.sass)
    encodings = _second_half.findall(kernel.sass)
    return [
        _with_scheduling(name, operands, int(encoding, 16))
        for (name, operands), encoding in zip(found, encodings, strict=True)
    ]


def loops_in(kernel: GPUKernel) -> list[list[str]]:
    """Return the names of the instructions of each loop.

    An outer loop contains the instructions of its inner loops.
    """
    names = names_in(kernel)
    return [names[start:stop] for start, stop in loop_ranges(kernel)]


def loop_ranges(kernel: GPUKernel) -> list[tuple[int, int]]:
    """Return the range of instructions of each loop, as `(start, stop)`."""
    labels: dict[str, int] = {}
    found: list[tuple[str, str]] = []
    for line in kernel.sass.splitlines():
        if label := _label.match(line):
            labels[label[1]] = len(found)
        found += _instruction.findall(line)
    ranges = []
    for end, (name, operands) in enumerate(found):
        target = re.search(r"\.L_x_\d+", operands)
        if name.startswith("BRA") and target:
            start = labels.get(target[0], end)
            # The last instruction of a kernel jumps to itself and is never reached.
            if start < end:
                ranges.append((start, end + 1))
    return ranges


def _with_scheduling(name: str, operands: str, encoding: int) -> Instruction:
    def scoreboard(bit: int) -> int | None:
        index = encoding >> bit & 7
        return None if index == 7 else index

    return Instruction(
        name,
        operands,
        stall=encoding >> 41 & 15,
        yields=not encoding >> 45 & 1,
        writes=scoreboard(46),
        reads=scoreboard(49),
        waits=tuple(i for i in range(6) if encoding >> 52 + i & 1),
    )
