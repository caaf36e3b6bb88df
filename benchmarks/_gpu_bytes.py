"""Kernels that a program for a GPU starts, by its HLO: bytes that each reads and
writes, and products that it adds up.

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


class Product(NamedTuple):
    """A product of two matrices: multiplications, the dtype of the operands, and bytes
    of what is converted to it within the kernel, before and after."""

    products: int
    dtype: str
    converted: int = 0


class Step(NamedTuple):
    """A kernel, started so many times."""

    name: str
    bytes: int
    product: Product | None = None
    count: int = 1


class Cost(NamedTuple):
    launches: int
    bytes: int


def cost(text: str) -> Cost:
    """Of a compiled program."""
    found = steps(text)
    return Cost(sum(s.count for s in found), sum(s.bytes * s.count for s in found))


def steps(text: str) -> list[Step]:
    """Of a compiled program, in order."""
    computations, entry = _parse(text)

    def of(name: str) -> list[Step]:
        out: list[Step] = []
        shapes: dict[str, str] = {}
        for instruction in computations[name]:
            shapes[instruction.name] = instruction.shape
            # An array whose values do not matter is only given its place.
            allocates = "AllocateBuffer" in instruction.attributes
            if instruction.operation in _nothing or allocates:
                continue
            operands = [shapes[x] for x in _reference.findall(instruction.operands)]
            called = lambda key, at=instruction.attributes: _reference.findall(
                _attribute(at, key)
            )[0]
            if instruction.operation == "while":
                trips = re.search(r"known_trip_count\D+(\d+)", instruction.attributes)
                count = int(trips[1]) if trips else 1
                inner = [*of(called("condition")), *of(called("body"))]
                out += [step._replace(count=step.count * count) for step in inner]
            elif instruction.operation in ("call", "async-start"):
                key = "to_apply" if instruction.operation == "call" else "calls"
                out += of(called(key))
            elif instruction.operation == "fusion":
                moved = fused(called("calls"), operands, instruction.shape)
                found = product_in(called("calls"))
                out.append(Step(instruction.name, moved, found))
            else:
                assert "__cublas" not in instruction.attributes, "a product not counted"
                moved = sum(map(_bytes_of, operands)) + _bytes_of(instruction.shape)
                out.append(Step(instruction.name, moved))
        return out

    def product_in(name: str) -> Product | None:
        body = {x.name: x for x in computations[name]}
        for instruction in body.values():
            if instruction.operation == "fusion":
                inner = _reference.findall(_attribute(instruction.attributes, "calls"))
                if found := product_in(inner[0]):
                    return found
            if instruction.operation != "dot":
                continue
            operands = [body[x] for x in _reference.findall(instruction.operands)]
            ((dtype, dims),) = _arrays_in(operands[0].shape)
            contracted = _attribute(instruction.attributes, "lhs_contracting_dims")
            each = math.prod(dims[int(i)] for i in re.findall(r"\d+", contracted))
            ((_, out),) = _arrays_in(instruction.shape)
            converted = 0
            for operand in operands:
                if operand.operation == "convert":
                    before = body[_reference.findall(operand.operands)[0]]
                    converted += _bytes_of(before.shape) + _bytes_of(operand.shape)
            return Product(each * math.prod(out), dtype, converted)
        return None

    def fused(name: str, operands: list[str], shape: str) -> int:
        body = computations[name]
        written, total = _bytes_of(shape), 0
        shapes = {x.name: x.shape for x in body}
        for instruction in body:
            if instruction.operation == "dynamic-update-slice" and instruction.is_root:
                inputs = _reference.findall(instruction.operands)
                written = _bytes_of(shapes[inputs[1]])

        def is_updated(array: str, by) -> bool:
            inputs = _reference.findall(by.operands)
            return by.operation == "dynamic-update-slice" and inputs[0] == array

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
            elif users and all(is_updated(instruction.name, x) for x in users):
                size = 0
            total += size
        return written + total

    return of(entry)


def _bytes_of(shape: str) -> int:
    total = 0
    for dtype, dims in _arrays_in(shape):
        digits = re.search(r"\d+", dtype)
        size = _sizes.get(dtype) or max(int(digits[0]) // 8 if digits else 1, 1)
        total += size * math.prod(dims)
    return total
