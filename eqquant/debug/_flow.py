"""Data flow of weights through a program.

A `Flow` bounds, for one array, the number of elements of each weight that its values
depend on. The effect of an operation depends on its kind only, so that the same rules
serve equations of a jaxpr and XLA instructions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, eq=False)  # Compared by identity.
class Weight:
    """A quantized array whose codes are followed."""

    size: int  # Elements of the array.
    decoded: int  # Elements of its codes, including padding.
    per_code: int  # Elements per item of the codes.
    matrices: frozenset[int]  # Sizes of the array, and of one matrix of its stack.


@dataclass(frozen=True)
class Flow:
    """The dependencies of the values of an array.

    - `elements`: the number of elements of each weight.
    - `data`: whether the values also depend on other arrays.
    """

    elements: Mapping[Weight, int] = field(default_factory=dict)
    data: bool = False


class Operand(NamedTuple):
    flow: Flow
    size: int
    can_be_activation: bool  # Whether the dtype is floating point or 8-bit.


def is_whole(flow: Flow, size: int) -> bool:
    """Return whether a floating-point array of this size is a decoded weight, one
    matrix of a stack, or several weights together."""
    if any(size in w.matrices and n >= size > 1 for w, n in flow.elements.items()):
        return True
    complete = all(n >= w.size for w, n in flow.elements.items())
    sizes = [w.size for w in flow.elements]
    return len(sizes) > 1 and complete and size == sum(sizes)


def join(flows: Iterable[Flow]) -> Flow:
    """Return the flow of an array that depends on any of several arrays."""
    elements: dict[Weight, int] = {}
    data = False
    for flow in flows:
        data |= flow.data
        for weight, n in flow.elements.items():
            elements[weight] = max(n, elements.get(weight, 0))
    return Flow(elements, data)


def at_most(flow: Flow, size: int) -> Flow:
    """Bound a flow by the number of elements in an array of `size` items."""
    most = lambda w: min(w.decoded, size * w.per_code)
    return Flow({w: min(n, most(w)) for w, n in flow.elements.items()}, flow.data)


def times(flow: Flow, count: int) -> Flow:
    """Return the flow of `count` such arrays in sequence."""
    elements = {w: min(n * count, w.decoded) for w, n in flow.elements.items()}
    return Flow(elements, flow.data)


def _nothing(flow: Flow) -> Flow:
    return Flow(data=flow.data)


#
# Kinds of operations
#


def _product(operands: Sequence[Operand], size: int, window: int) -> Flow:
    """Return the flow of a product, which is an activation."""
    return _nothing(join(x.flow for x in operands))


def _reduction(operands: Sequence[Operand], size: int, window: int) -> Flow:
    flow = join(x.flow for x in operands)
    return _nothing(flow) if size < operands[0].size else flow


def _lookup(operands: Sequence[Operand], size: int, window: int) -> Flow:
    """Return the flow of a lookup.

    Rows at indices from the data are an activation. All rows in order, or a whole
    matrix of a stack, are the weight.
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
    """Return the flow of a kernel, whose inside is not inspected.

    A kernel with codes and an activation is a product; a kernel with codes only
    decodes.
    """
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
    """Return the flow of a larger array after a part is written into it."""
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
    """Return the flow of a result.

    **Arguments:**

    - `name`: the name of the primitive, or of XLA's operation.
    - `operands`: the flows of the operands.
    - `size`: the number of elements of the result.
    - `window`: for a lookup, the number of elements per index.
    """
    kind = _kind_of.get(name.replace("-", "_"), _other)
    return at_most(kind(operands, size, window), size)


def is_known(name: str) -> bool:
    return name in _kind_of


def is_kernel(name: str) -> bool:
    return _kind_of.get(name) is _kernel


def settle(step: Callable[[list[Flow]], list[Flow]], carry: list[Flow]) -> list[Flow]:
    """Return the flow of a loop carry after any number of steps."""
    while True:
        out = [join(pair) for pair in zip(carry, step(carry), strict=True)]
        if out == carry:
            return carry
        carry = [_widen(*pair) for pair in zip(carry, out, strict=True)]


def _widen(before: Flow, flow: Flow) -> Flow:
    """Return an upper bound for a flow that grows in each step."""
    elements = {
        w: n if before.elements.get(w, n) == n else w.decoded
        for w, n in flow.elements.items()
    }
    return Flow(elements, flow.data)
