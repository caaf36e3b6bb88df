"""Follows weights through a program.

A `Flow` says of one array how many elements of each weight its values may be made of.
How an operation changes a flow depends only on the kind of the operation, so the same
rules serve equations of a jaxpr and instructions of XLA.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, eq=False)  # Compared by identity.
class Weight:
    """A quantized array whose codes are followed."""

    size: int  # Elements of the array.
    decoded: int  # Elements that its codes stand for: padding, too.
    per_code: int  # How many elements one item of the codes stands for.
    matrices: frozenset[int]  # Sizes of the array and of one matrix of its stack.


@dataclass(frozen=True)
class Flow:
    """What the values of an array depend on.

    - `elements`: how many elements of each weight.
    - `data`: whether on anything outside of quantized arrays, too.
    """

    elements: Mapping[Weight, int] = field(default_factory=dict)
    data: bool = False


class Operand(NamedTuple):
    flow: Flow
    size: int
    can_be_activation: bool  # By its dtype: floating, or 8 bits.


def is_whole(flow: Flow, size: int) -> bool:
    """Whether an array of this size, in floating point, is a decoded weight, one matrix
    of a stack, or several weights together."""
    if any(size in w.matrices and n >= size > 1 for w, n in flow.elements.items()):
        return True
    complete = all(n >= w.size for w, n in flow.elements.items())
    sizes = [w.size for w in flow.elements]
    return len(sizes) > 1 and complete and size == sum(sizes)


def join(flows: Iterable[Flow]) -> Flow:
    """Of an array that is made of any of several."""
    elements: dict[Weight, int] = {}
    data = False
    for flow in flows:
        data |= flow.data
        for weight, n in flow.elements.items():
            elements[weight] = max(n, elements.get(weight, 0))
    return Flow(elements, data)


def at_most(flow: Flow, size: int) -> Flow:
    """As an array of `size` items has it, which holds no more than these stand for."""
    most = lambda w: min(w.decoded, size * w.per_code)
    return Flow({w: min(n, most(w)) for w, n in flow.elements.items()}, flow.data)


def times(flow: Flow, count: int) -> Flow:
    """Of `count` such arrays, one after the other."""
    elements = {w: min(n * count, w.decoded) for w, n in flow.elements.items()}
    return Flow(elements, flow.data)


def _nothing(flow: Flow) -> Flow:
    return Flow(data=flow.data)


#
# Kinds of operations
#


def _product(operands: Sequence[Operand], size: int, window: int) -> Flow:
    """The result is an activation."""
    return _nothing(join(x.flow for x in operands))


def _reduction(operands: Sequence[Operand], size: int, window: int) -> Flow:
    flow = join(x.flow for x in operands)
    return _nothing(flow) if size < operands[0].size else flow


def _lookup(operands: Sequence[Operand], size: int, window: int) -> Flow:
    """Rows that indices from the data ask for are an activation, however many. All rows
    in order, and a whole matrix of a stack, are the weight."""
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
    """What is inside is its own business. One that gets an activation beside the codes
    multiplies them; any other decodes."""
    flow = join(x.flow for x in operands)
    for x in operands:
        if x.can_be_activation and x.flow.data and not x.flow.elements:
            return _nothing(flow)
    return flow


def _concatenation(operands: Sequence[Operand], size: int, window: int) -> Flow:
    flow = join(x.flow for x in operands)
    parts = [x.flow.elements for x in operands]
    total = {w: sum(part.get(w, 0) for part in parts) for w in flow.elements}
    return Flow(total, flow.data)


def _placement(operands: Sequence[Operand], size: int, window: int) -> Flow:
    """Parts are put into something larger: the other parts may follow."""
    flow = join(x.flow for x in operands)
    return Flow({w: w.decoded for w in flow.elements}, flow.data)


def _other(operands: Sequence[Operand], size: int, window: int) -> Flow:
    return join(x.flow for x in operands)


_kinds: dict[Callable, str] = {
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
_kind_of = {name: kind for kind, names in _kinds.items() for name in names.split()}


def after(name: str, operands: Sequence[Operand], size: int, window: int = 0) -> Flow:
    """What a result is made of.

    **Arguments:**

    - `name`: of the primitive, or of XLA's operation.
    - `operands`: what it gets.
    - `size`: elements of the result.
    - `window`: of a lookup, how many elements each index asks for.
    """
    kind = _kind_of.get(name.replace("-", "_"), _other)
    return at_most(kind(operands, size, window), size)


def is_known(name: str) -> bool:
    return name in _kind_of


def is_kernel(name: str) -> bool:
    return _kind_of.get(name) is _kernel


def settle(step: Callable[[list[Flow]], list[Flow]], carry: list[Flow]) -> list[Flow]:
    """What a loop carries, after any number of steps."""
    while True:
        out = [join(pair) for pair in zip(carry, step(carry), strict=True)]
        if out == carry:
            return carry
        carry = [_widen(*pair) for pair in zip(carry, out, strict=True)]


def _widen(before: Flow, flow: Flow) -> Flow:
    """What grows may grow up to all there is."""
    elements = {
        w: n if before.elements.get(w, n) == n else w.decoded
        for w, n in flow.elements.items()
    }
    return Flow(elements, flow.data)
