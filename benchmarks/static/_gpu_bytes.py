"""Count the kernel launches and the memory traffic of a compiled GPU program.

The counts come from the HLO of the program. Each kernel reads and writes each of its
arrays once, from and to memory. If a kernel only slices an array, only the slice
counts. Caches reduce the real traffic below these counts.
"""

import math
import re
from typing import NamedTuple

from eqquant.debug._in_hlo import _attribute, _parse, _reference, arrays_in


_free = {
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
    """A matmul: its multiplications and the dtype of its operands.

    `converted` counts the bytes of operands that the kernel converts to that dtype,
    before and after the conversion.
    """

    products: int
    dtype: str
    converted: int = 0


class Step(NamedTuple):
    """A kernel, launched `count` times."""

    name: str
    bytes: int
    product: Product | None = None
    count: int = 1


class Cost(NamedTuple):
    launches: int
    bytes: int


def cost(text: str) -> Cost:
    """Return the launches and bytes of a compiled program."""
    found = steps(text)
    return Cost(sum(s.count for s in found), sum(s.bytes * s.count for s in found))


def steps(text: str) -> list[Step]:
    """List the kernels that a compiled program launches, in order."""
    computations, entry = _parse(text)

    def steps_in(name: str) -> list[Step]:
        out: list[Step] = []
        shapes: dict[str, str] = {}
        for instruction in computations[name]:
            shapes[instruction.name] = instruction.shape
            # `AllocateBuffer` reserves memory and writes nothing.
            allocates = "AllocateBuffer" in instruction.attributes
            if instruction.operation in _free or allocates:
                continue
            operands = [shapes[x] for x in _reference.findall(instruction.operands)]
            called = lambda key, at=instruction.attributes: _reference.findall(
                _attribute(at, key)
            )[0]
            if instruction.operation == "while":
                trips = re.search(r"known_trip_count\D+(\d+)", instruction.attributes)
                count = int(trips[1]) if trips else 1
                inner = [*steps_in(called("condition")), *steps_in(called("body"))]
                out += [step._replace(count=step.count * count) for step in inner]
            elif instruction.operation in ("call", "async-start"):
                key = "to_apply" if instruction.operation == "call" else "calls"
                out += steps_in(called(key))
            elif instruction.operation == "fusion":
                moved = fused(called("calls"), operands, instruction.shape)
                found = product_in(called("calls"))
                out.append(Step(instruction.name, moved, found))
            else:
                is_cublas = "__cublas" in instruction.attributes
                assert not is_cublas, "cuBLAS calls are not counted"
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
            ((dtype, dims),) = arrays_in(operands[0].shape)
            contracted = _attribute(instruction.attributes, "lhs_contracting_dims")
            contracted_size = math.prod(
                dims[int(i)] for i in re.findall(r"\d+", contracted)
            )
            ((_, out),) = arrays_in(instruction.shape)
            converted = 0
            for operand in operands:
                if operand.operation == "convert":
                    before = body[_reference.findall(operand.operands)[0]]
                    converted += _bytes_of(before.shape) + _bytes_of(operand.shape)
            return Product(contracted_size * math.prod(out), dtype, converted)
        return None

    def fused(name: str, operands: list[str], shape: str) -> int:
        body = computations[name]
        written, total = _bytes_of(shape), 0
        shapes = {x.name: x.shape for x in body}
        for instruction in body:
            if instruction.operation == "dynamic-update-slice" and instruction.is_root:
                inputs = _reference.findall(instruction.operands)
                written = _bytes_of(shapes[inputs[1]])

        def is_updated(array: str, user) -> bool:
            inputs = _reference.findall(user.operands)
            return user.operation == "dynamic-update-slice" and inputs[0] == array

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

    return steps_in(entry)


def _bytes_of(shape: str) -> int:
    total = 0
    for dtype, dims in arrays_in(shape):
        digits = re.search(r"\d+", dtype)
        size = _sizes.get(dtype) or max(int(digits[0]) // 8 if digits else 1, 1)
        total += size * math.prod(dims)
    return total
