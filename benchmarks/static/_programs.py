"""Count the kernels and the collectives of a program that XLA compiled."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple


class Moved(NamedTuple):
    """The key of a count of bytes: a kind of collective and a dtype."""

    kind: str
    dtype: str


class Instruction(NamedTuple):
    """An instruction: its line, name, kind and operands, the bytes and the memory space
    of each array of its result (HBM is 0), and the dtype and shape of the first."""

    line: str
    name: str
    kind: str
    operands: list[str]
    arrays: list[tuple[int, int]]
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The bytes of the first array of the result."""
        return self.arrays[0][0] if self.arrays else 0

    @property
    def position(self) -> int | None:
        """The position of a parameter."""
        found = re.search(r" parameter\((\d+)\)", self.line)
        return None if found is None else int(found[1])

    @classmethod
    def parse(cls, line: str) -> "Instruction | None":
        found = _instruction.match(line)
        if found is None:
            return None
        name, results, kind, rest = found.groups()
        arrays, shapes = [], []
        for dtype, sizes, layout in _placed.findall(results):
            shape = tuple(int(n) for n in sizes.split(",") if n)
            space = re.search(r"S\((\d+)\)", layout)
            arrays.append(
                (math.prod(shape) * _bytes(dtype), int(space[1]) if space else 0)
            )
            shapes.append((dtype, shape))
        operands = _operand.findall(rest.split("), ")[0])
        return cls(line, name, kind, operands, arrays, *(shapes or [("", ())])[0])


class Program:
    """The parsed text of a `jax.stages.Compiled`."""

    def __init__(self, text: str):
        self.lines: dict[str, list[str]] = {}
        self.entry = name = ""
        for line in text.splitlines():
            if header := _header.match(line):
                name = header[2]
                self.lines[name] = []
                self.entry = name if header[1] else self.entry
            elif name:
                self.lines[name].append(line)

    def run(self) -> Iterator[tuple[str, int]]:
        """Yield every instruction and the number of times that it runs."""
        todo = [(self.entry, 1)]
        while todo:
            name, times = todo.pop()
            for line in self.lines[name]:
                yield line, times
                called = dict(_called.findall(line))
                trips = self.trips(called["condition"]) if "body" in called else 1
                todo += [(inner, times * trips) for inner in called.values()]

    def trips(self, condition: str) -> int:
        """Return the trip count of a loop that counts up to a constant."""
        text = "\n".join(self.lines[condition])
        return max(int(n) for n in _constant.findall(text))

    def kernels(self) -> Counter:
        """Count the kernels of the program by name."""
        names = Counter()
        for line, _ in self.run():
            if 'custom_call_target="tpu_custom_call"' in line:
                names[_kernel.search(line)[1]] += 1
        return names

    def memory_traffic(self) -> Counter:
        """Sum the bytes that each kind of instruction reads and writes in HBM, in one
        run on one device.

        An instruction reads the whole of an operand, except operands of which it takes
        slices, and stacks of which a kernel reads one entry. An update in place writes
        the update.
        """
        total, todo = Counter(), [(self.entry, 1)]
        while todo:
            name, times = todo.pop()
            known = self.instructions(name)
            for found in known.values():
                total[found.kind] += times * self._moved(found, known)
                called = dict(_called.findall(found.line))
                if "body" in called:
                    trips = self.trips(called["condition"])
                    todo.append((called["body"], times * trips))
        return +total

    def instructions(self, name: str) -> dict[str, "Instruction"]:
        """Return the instructions of a computation by name."""
        found = map(Instruction.parse, self.lines[name])
        return {one.name: one for one in found if one is not None}

    def _moved(self, one: "Instruction", known: dict) -> int:
        operands = [known[name] for name in one.operands if name in known]
        in_hbm = lambda x: sum(n for n, space in x.arrays if not space)
        if one.kind in ("copy-start", "slice-start", "async-start"):
            # The tuple has the operands, then the result, or the reverse.
            first, second = [*one.arrays, (0, 0)][:2]
            size = min(first[0], second[0])
            return size * sum(not space for _, space in (first, second))
        if one.kind in _free or one.kind.endswith("-done"):
            return 0
        if one.kind == "fusion":
            return self._of_fusion(one, operands)
        if one.kind == "dynamic-update-slice":
            return in_hbm(operands[1]) + operands[1].size * (not one.arrays[0][1])
        if one.kind in _slices:
            return in_hbm(one) + one.size * (not operands[0].arrays[0][1])
        read = list(map(in_hbm, operands))
        if "tpu_custom_call" in one.line and operands and operands[0].dtype == "s32":
            read = [
                size // (x.shape[0] if len(x.shape) > 2 else 1)
                for size, x in zip(read, operands, strict=True)
            ]
        return in_hbm(one) + sum(read)

    def _of_fusion(self, one: "Instruction", operands: list) -> int:
        used = [self._use(one, i) for i in range(len(operands))]
        both = zip(used, operands, strict=True)
        read = sum(size for (size, _), x in both if not x.arrays[0][1])
        written = sum(updated for _, updated in used)
        return read + (written or sum(n for n, space in one.arrays if not space))

    def _use(self, fusion: "Instruction", position: int) -> tuple[int, int]:
        """Return the bytes of an operand that a fusion reads, and the bytes that it
        updates in place."""
        inner = self.instructions(dict(_called.findall(fusion.line))["calls"])
        (value,) = (x for x in inner.values() if x.position == position)
        read = updated = 0
        todo = [value]
        while todo:
            x = todo.pop()
            for use in inner.values():
                if x.name not in use.operands:
                    continue
                place = use.operands.index(x.name)
                moves = use.kind in _moves or "output_to_operand_aliasing" in use.line
                if moves and "ROOT" not in use.line:
                    todo.append(use)
                elif use.kind == "fusion":
                    part = self._use(use, place)
                    read, updated = read + part[0], updated + part[1]
                elif use.kind in _slices and not place:
                    read += use.size
                elif use.kind == "dynamic-update-slice" and not place:
                    updated += inner[use.operands[1]].size
                else:
                    read += value.size
        return min(read, value.size), updated

    def collectives(self) -> tuple[Counter, Counter]:
        """Count collectives by kind, and their bytes by kind and dtype.

        Bytes are the results on one device in one run of the program.
        """
        count, total = Counter(), Counter()
        for line, times in self.run():
            found = _collective.search(line)
            if not found:
                continue
            results, kind, started = found.groups()
            arrays = _array.findall(results)
            if started and kind != "all-reduce":
                # The tuple holds operands, then results, then scalars for bookkeeping.
                arrays = [(dtype, sizes) for dtype, sizes in arrays if sizes]
                arrays = arrays[len(arrays) // 2 :]
            count[kind] += 1
            for dtype, sizes in arrays:
                size = math.prod(int(n) for n in sizes.split(",") if n)
                total[Moved(kind, dtype)] += times * size * _bytes(dtype)
        return count, total


def _bytes(dtype: str) -> int:
    return max(int(re.findall(r"\d+", dtype)[0]) // 8, 1) if dtype != "pred" else 1


_header = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_called = re.compile(
    r"\b(body|condition|calls|to_apply|called_computations)=\{?%?([\w.\-]+)"
)
_constant = re.compile(r"[su]32\[\]\S* constant\((\d+)\)")
_kernel = re.compile(r"%?([\w\-]+)[.\w]* = ")
_collective = re.compile(
    r" = (\(.*?\)|\S+) "
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_array = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
_instruction = re.compile(
    r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)(?= [a-z])|\S+) ([a-z][\w\-]*)\((.*)"
)
_placed = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\](\{[^}]*\})?")
_operand = re.compile(r"%([\w.\-]+)")
_moves = "bitcast", "copy", "convert", "reshape", "transpose"
_slices = "dynamic-slice", "slice", "gather"
_free = "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while"
_free += "iota", "partition-id", "conditional"
