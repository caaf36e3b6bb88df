"""Find weights that a compiled program decodes.

XLA may decode a weight even if the jaxpr does not.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ._flow import after, Flow, is_known, is_whole, join, Operand, settle


# The flow of an array, or a list of values for a tuple.
_Value = Any


class _Instruction(NamedTuple):
    is_root: bool
    name: str
    shape: str
    operation: str
    operands: str  # The text within the parentheses.
    attributes: str  # The text after the parentheses.


def decoded_in_hlo(text: str, flows: Sequence[Flow]) -> list[str]:
    """Return the instruction and shape of each array in memory that is a whole weight.

    Values inside a fusion do not count, because they are never in memory.

    **Arguments:**

    - `text`: the optimised HLO.
    - `flows`: the flows of its parameters.
    """
    program = _Program(text)
    program.run(program.entry, list(flows), in_memory=True)
    return list(program.found)


class _Program:
    def __init__(self, text: str):
        self.computations, self.entry = _parse(text)
        self.found: dict[str, None] = {}  # An ordered set.

    def run(self, name: str, args: Sequence[_Value], in_memory: bool) -> _Value:
        """Return the value of the root of a computation."""
        known: dict[str, tuple[_Value, str]] = {}
        root = Flow()
        for instruction in self.computations[name]:
            if instruction.operation == "parameter":
                value = args[int(instruction.operands)]
            else:
                names = _reference.findall(instruction.operands)
                operands = [known.get(name, (Flow(), "")) for name in names]
                value = self.value(instruction, operands, in_memory)
                if in_memory:
                    self.check(instruction, value)
            known[instruction.name] = value, instruction.shape
            root = value if instruction.is_root else root
        return root

    def value(
        self,
        instruction: _Instruction,
        operands: list[tuple[_Value, str]],
        in_memory: bool,
    ) -> _Value:
        operation, attributes = instruction.operation, instruction.attributes
        values = [value for value, _ in operands]
        called = lambda key: _reference.findall(_attribute(attributes, key))
        if operation == "tuple":
            return values
        if operation == "get-tuple-element":
            (value,) = values
            index = int(_attribute(attributes, "index"))
            return value[index] if isinstance(value, list) else value
        if operation == "opt-barrier":
            return values[0]
        if operation == "fusion":
            return self.run(called("calls")[0], values, in_memory=False)
        if operation == "call":
            return self.run(called("to_apply")[0], values, in_memory)
        if operation == "custom-call" and called("called_computations"):
            return self.run(called("called_computations")[0], values, in_memory)
        # An async-start may have fewer operands than its computation.
        if operation == "async-start" and self.has_parameters(
            called("calls"), len(values)
        ):
            return [values, self.run(called("calls")[0], values, in_memory), Flow()]
        if operation == "async-done" and isinstance(values[0], list):
            operands_of_start, *results = values[0]
            if isinstance(operands_of_start, list):
                return results[0]
        if operation == "while":
            return self.loop(called("body")[0], values[0], in_memory)
        if operation == "conditional":
            names = called("branch_computations")
            names += called("true_computation") + called("false_computation")
            pairs = zip(names, values[1:], strict=True)
            outs = [self.run(name, [value], in_memory) for name, value in pairs]
            columns = zip(*map(_flows_in, outs), strict=True)
            return _like(outs[0], iter([join(column) for column in columns]))
        if operation == "constant":  # An iota is not a constant.
            return Flow(data=_size(instruction.shape) > 1)
        inputs = [
            Operand(join(_flows_in(value)), _size(shape), _can_be_activation(shape))
            for value, shape in operands
        ]
        window = _attribute(attributes, "(?:dynamic_)?slice_sizes")
        window = math.prod(map(int, re.findall(r"\d+", window)))
        target = _attribute(attributes, "custom_call_target").strip('"')
        operation = target if is_known(target) else operation
        outs = [
            after(operation, inputs, math.prod(dims), window)
            for _, dims in arrays_in(instruction.shape)
        ]
        return outs if instruction.shape.startswith("(") else outs[0]

    def has_parameters(self, names: list[str], count: int) -> bool:
        """Return whether the named computations have `count` parameters in total."""
        operations = [x.operation for name in names for x in self.computations[name]]
        return bool(names) and operations.count("parameter") == count

    def loop(self, body: str, carry: _Value, in_memory: bool) -> _Value:
        def step(flows: list[Flow]) -> list[Flow]:
            return _flows_in(self.run(body, [_like(carry, iter(flows))], in_memory))

        return _like(carry, iter(settle(step, _flows_in(carry))))

    def check(self, instruction: _Instruction, value: _Value):
        if instruction.operation in ("get-tuple-element", "tuple", "bitcast"):
            return
        arrays = list(arrays_in(instruction.shape))
        flows = _flows_in(value)
        if len(flows) != len(arrays):
            return  # A token or nested tuples.
        for flow, (dtype, dims) in zip(flows, arrays, strict=True):
            if _floating.fullmatch(dtype) and is_whole(flow, math.prod(dims)):
                shape = f"{dtype}[{','.join(map(str, dims))}]"
                self.found[f"compiled: {instruction.operation} -> {shape}"] = None


#
# Values and shapes
#


def _flows_in(value: _Value) -> list[Flow]:
    if isinstance(value, Flow):
        return [value]
    return [flow for element in value for flow in _flows_in(element)]


def _like(value: _Value, flows: Iterator[Flow]) -> _Value:
    """Arrange `flows` in the tuples of `value`."""
    if isinstance(value, Flow):
        return next(flows)
    return [_like(element, flows) for element in value]


_array = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_floating = re.compile(r"bf16|f\d\w*")
_activation = re.compile(r"bf16|f\d\w*|[su]8")


def arrays_in(shape: str) -> Iterator[tuple[str, list[int]]]:
    """Yield the dtype and the dimensions of each array of a shape."""
    for dtype, dims in _array.findall(shape):
        yield dtype, [int(n) for n in re.findall(r"\d+", dims)]


def _size(shape: str) -> int:
    return sum(math.prod(dims) for _, dims in arrays_in(shape))


def _can_be_activation(shape: str) -> bool:
    return any(_activation.fullmatch(dtype) for dtype, _ in arrays_in(shape))


#
# Parsing
#


def instructions_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield the operation and the shape of each instruction of a program."""
    for instructions in _parse(text)[0].values():
        for instruction in instructions:
            yield instruction.operation, instruction.shape


_header = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_name = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_operation = re.compile(r"\s*([\w\-]+)\(")
_reference = re.compile(r"%([\w.\-]+)")
_comment = re.compile(r"/\*.*?\*/")


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Return the instructions of each computation, and the name of the entry."""
    computations: dict[str, list[_Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        header = _header.match(line)
        if header:
            name = header[2]
            computations[name] = []
            entry = name if header[1] else entry
            continue
        start = _name.match(line)
        if not start or not name:
            continue
        line = _comment.sub("", line)
        after_shape = _end(line, start.end())
        operation = _operation.match(line, after_shape)
        if not operation:
            raise RuntimeError(f"Cannot parse this line of HLO: {line.strip()}")
        end = _closing(line, operation.end() - 1)
        instruction = _Instruction(
            is_root=bool(start[1]),
            name=start[2],
            shape=line[start.end() : after_shape],
            operation=operation[1],
            operands=line[operation.end() : end],
            attributes=line[end + 1 :],
        )
        computations[name].append(instruction)
    return computations, entry


def _end(line: str, start: int) -> int:
    """Return the index behind the shape that starts at `start`."""
    if line[start] == "(":
        return _closing(line, start) + 1
    return line.index(" ", start)


def _closing(line: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[i], 0)
        if depth == 0:
            return i
    raise RuntimeError(f"Cannot parse this line of HLO: {line.strip()}")


def _attribute(attributes: str, key: str) -> str:
    """Return the value of `key=value` or `key={values}`, or an empty string."""
    found = re.search(rf", {key}=(\{{[^{{}}]*\}}|[^,\s]+)", attributes)
    return found[1] if found else ""
