"""Track the elements of quantized weights through a program.

A `Flow` counts, for each weight, the elements that an array may depend on. The rules
depend only on the kind of an operation. The equations of a jaxpr and the instructions
of XLA share them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, eq=False)  # Compared by identity.
class TrackedWeight:
    """A quantized array whose codes are tracked.

    - `size`: the number of elements of the array.
    - `decoded`: the number of elements of the array with its padding.
    - `per_code`: the number of elements per item of the codes.
    - `matrices`: the sizes of the array and of one matrix of a stack, with and without
        padding.
    """

    size: int
    decoded: int
    per_code: int
    matrices: frozenset[int]


@dataclass(frozen=True)
class Flow:
    """The inputs that an array depends on.

    - `elements`: an upper bound on the number of elements of each weight.
    - `data`: whether the array also depends on inputs that are not quantized arrays.
    """

    elements: Mapping[TrackedWeight, int] = field(default_factory=dict)
    data: bool = False


class Operand(NamedTuple):
    """An operand of an operation. Activations have a floating dtype, or 8 bits."""

    flow: Flow
    size: int
    can_be_activation: bool


def is_whole(flow: Flow, size: int) -> bool:
    """Return whether a floating-point array of `size` elements is a decoded weight, one
    matrix of a stack, or the concatenation of several weights."""
    if any(size in w.matrices and n >= size > 1 for w, n in flow.elements.items()):
        return True
    complete = all(n >= w.size for w, n in flow.elements.items())
    sizes = [w.size for w in flow.elements]
    return len(sizes) > 1 and complete and size == sum(sizes)


def join(flows: Iterable[Flow]) -> Flow:
    """Return the flow of an array that may depend on each of several arrays."""
    elements: dict[TrackedWeight, int] = {}
    data = False
    for flow in flows:
        data |= flow.data
        for weight, n in flow.elements.items():
            elements[weight] = max(n, elements.get(weight, 0))
    return Flow(elements, data)


def at_most(flow: Flow, size: int) -> Flow:
    """Limit a flow to the number of elements that an array of `size` items can hold."""
    limit = lambda w: min(w.decoded, size * w.per_code)
    return Flow({w: min(n, limit(w)) for w, n in flow.elements.items()}, flow.data)


def times(flow: Flow, count: int) -> Flow:
    """Return the flow of `count` stacked arrays."""
    elements = {w: min(n * count, w.decoded) for w, n in flow.elements.items()}
    return Flow(elements, flow.data)


def _without_weights(flow: Flow) -> Flow:
    return Flow(data=flow.data)


#
# Kinds of operations
#


def _product(operands: Sequence[Operand], size: int, window: int) -> Flow:
    """The result is an activation."""
    return _without_weights(join(x.flow for x in operands))


def _reduction(operands: Sequence[Operand], size: int, window: int) -> Flow:
    flow = join(x.flow for x in operands)
    return _without_weights(flow) if size < operands[0].size else flow


def _lookup(operands: Sequence[Operand], size: int, window: int) -> Flow:
    """Rows that are selected by data are an activation, whatever their number.

    All rows in order, or a whole matrix of a stack, are a weight.
    """
    source, *indices = operands
    flow = join(x.flow for x in operands)
    if not any(x.flow.data for x in indices):
        return flow
    kept = {
        w: n
        for w, n in flow.elements.items()
        if w not in source.flow.elements or window * w.per_code >= min(w.matrices)
    }
    return Flow(kept, True)


def _kernel(operands: Sequence[Operand], size: int, window: int) -> Flow:
    """A kernel with an activation as an operand multiplies. Other kernels decode."""
    flow = join(x.flow for x in operands)
    for x in operands:
        if x.can_be_activation and x.flow.data and not x.flow.elements:
            return _without_weights(flow)
    return flow


def _concatenation(operands: Sequence[Operand], size: int, window: int) -> Flow:
    flow = join(x.flow for x in operands)
    parts = [x.flow.elements for x in operands]
    total = {w: sum(part.get(w, 0) for part in parts) for w in flow.elements}
    return Flow(total, flow.data)


def _placement(operands: Sequence[Operand], size: int, window: int) -> Flow:
    """The operand is a part of a larger array. Later operations may fill the rest."""
    flow = join(x.flow for x in operands)
    return Flow({w: w.decoded for w in flow.elements}, flow.data)


def _other(operands: Sequence[Operand], size: int, window: int) -> Flow:
    return join(x.flow for x in operands)


_operations: dict[Callable, str] = {
    _product: "dot dot_general ragged_dot ragged_dot_general conv_general_dilated "
    "convolution scaled_dot scaled_matmul quantized_dot rows_dot eqquant_dot",
    _reduction: "reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and "
    "reduce_or reduce_xor argmax argmin",
    _lookup: "gather dynamic_slice",
    _kernel: "pallas_call tpu_custom_call ffi_call custom_call",
    _concatenation: "concatenate",
    _placement: "pad dynamic_update_slice scatter scatter_add scatter_sub scatter_mul "
    "scatter_min scatter_max all_gather all_to_all",
}
_rules = {name: rule for rule, names in _operations.items() for name in names.split()}


def after(name: str, operands: Sequence[Operand], size: int, window: int = 0) -> Flow:
    """Return the flow of a result.

    **Arguments:**

    - `name`: the name of the primitive or of the XLA operation.
    - `operands`: its operands.
    - `size`: the number of elements of the result.
    - `window`: the number of elements that a lookup reads per index.
    """
    rule = _rules.get(name.replace("-", "_"), _other)
    return at_most(rule(operands, size, window), size)


def is_known(name: str) -> bool:
    return name in _rules


def is_kernel(name: str) -> bool:
    return _rules.get(name) is _kernel


def settle(step: Callable[[list[Flow]], list[Flow]], carry: list[Flow]) -> list[Flow]:
    """Return the flows of a loop's carry after any number of steps."""
    while True:
        out = [join(pair) for pair in zip(carry, step(carry), strict=True)]
        if out == carry:
            return carry
        carry = [_widen(*pair) for pair in zip(carry, out, strict=True)]


def _widen(before: Flow, flow: Flow) -> Flow:
    """Replace a count that increases by its upper bound, so that the loop ends."""
    elements = {
        w: n if before.elements.get(w, n) == n else w.decoded
        for w, n in flow.elements.items()
    }
    return Flow(elements, flow.data)
