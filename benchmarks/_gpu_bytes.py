"""Kernels that a program for a GPU starts, and bytes that these read and write, by its
HLO.

Each array counts once for each kernel that reads or writes it, as if it came from the
memory every time; of what a kernel slices only the slice counts. Caches make it less.
"""

import math
import re
from typing import NamedTuple

from eqquant.debug._in_hlo import _arrays_in, _attribute, _parse, _reference


_nothing = {
    "parameter",
    "constant",
    "bitcast",
    "tuple",
    "get-tuple-element",
    "opt-barrier",
    "copy-done",
    "after-all",
}
_sizes = {"pred": 1, "bf16": 2, "f16": 2}


class Cost(NamedTuple):
    launches: int
    bytes: int

    def times(self, count: int) -> "Cost":
        return Cost(self.launches * count, self.bytes * count)


def _bytes_of(shape: str) -> int:
    total = 0
    for dtype, dims in _arrays_in(shape):
        digits = re.search(r"\d+", dtype)
        size = _sizes.get(dtype) or max(int(digits[0]) // 8 if digits else 1, 1)
        total += size * math.prod(dims)
    return total


def cost(text: str) -> Cost:
    """Of a compiled program."""
    computations, entry = _parse(text)

    def of(name: str) -> Cost:
        launches = moved = 0
        shapes: dict[str, str] = {}
        for instruction in computations[name]:
            shapes[instruction.name] = instruction.shape
            if instruction.operation in _nothing:
                continue
            operands = [shapes[x] for x in _reference.findall(instruction.operands)]
            if instruction.operation == "while":
                trips = re.search(r"known_trip_count\D+(\d+)", instruction.attributes)
                called = [
                    _reference.findall(_attribute(instruction.attributes, key))[0]
                    for key in ("body", "condition")
                ]
                parts = [of(x).times(int(trips[1]) if trips else 1) for x in called]
                launches += sum(part.launches for part in parts)
                moved += sum(part.bytes for part in parts)
            elif instruction.operation in ("call", "async-start"):
                key = "to_apply" if instruction.operation == "call" else "calls"
                called = _reference.findall(_attribute(instruction.attributes, key))
                part = of(called[0])
                launches, moved = launches + part.launches, moved + part.bytes
            elif instruction.operation == "fusion":
                called = _reference.findall(_attribute(instruction.attributes, "calls"))
                launches += 1
                moved += fused(called[0], operands, instruction.shape)
            else:
                launches += 1
                moved += sum(map(_bytes_of, operands)) + _bytes_of(instruction.shape)
        return Cost(launches, moved)

    def fused(name: str, operands: list[str], shape: str) -> int:
        body = computations[name]
        written, total = _bytes_of(shape), 0
        shapes = {x.name: x.shape for x in body}
        for instruction in body:
            if instruction.operation == "dynamic-update-slice" and instruction.is_root:
                inputs = _reference.findall(instruction.operands)
                written = _bytes_of(shapes[inputs[1]])
        for instruction in body:
            if instruction.operation != "parameter":
                continue
            users = [
                x for x in body if instruction.name in _reference.findall(x.operands)
            ]
            slices = ("slice", "dynamic-slice")
            size = _bytes_of(operands[int(instruction.operands)])
            if users and all(x.operation in slices for x in users):
                size = min(size, sum(_bytes_of(x.shape) for x in users))
            elif users and all(x.operation == "dynamic-update-slice" for x in users):
                size = 0
            total += size
        return written + total

    return of(entry)
