"""The geometry of a contraction: permutations and shapes, computed from integers.

A quantized array stores its components as `(*lead, packed)`. A contraction divides the
leading axes into batch axes, rows and columns, and merges the columns with the blocked
axes. It then contracts either the columns and the blocked axes, or the rows.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any


# A size may be symbolic, in an exported program for any batch size.
Sizes = tuple[Any, ...]
Pairs = Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How to bring a contraction into the form of `quantized_dot`, and back.

    **Fields:**

    - `contract_rows`: whether the contraction is over rows rather than columns.
    - `stack`: the sizes of the batch axes.
    - `tokens`: the sizes of the free axes of the activation.
    - `rows`, `columns`: the sizes of the leading axes that become rows and columns.
    - `blocked`: the sizes of the blocked axes, in the order of storage.
    - `padding`: the number of values that fill the last block.
    - `weight_order`: the permutation of each component to
        `(*stack, *rows, *columns, packed)`.
    - `x_order`: the permutation of the activation to `(*stack, *tokens, *contracted)`.
    - `out_order`: the permutation of the result, whose free weight axes are in the
        order of storage, to the order of the array.
    """

    contract_rows: bool
    stack: Sizes
    tokens: Sizes
    rows: Sizes
    columns: Sizes
    blocked: Sizes
    padding: int
    weight_order: Sizes
    x_order: Sizes
    out_order: Sizes

    @property
    def num_lead(self) -> int:
        """The number of axes of the result before those of the weight."""
        return len(self.stack) + len(self.tokens)

    @property
    def row_axes(self) -> slice:
        """The rows among the permuted axes of a component."""
        return slice(len(self.stack), len(self.stack) + len(self.rows))

    @property
    def column_axes(self) -> slice:
        """The columns and the packed axis among the permuted axes of a component."""
        return slice(len(self.stack) + len(self.rows), None)

    @property
    def free_axes(self) -> slice:
        """The permuted axes of a component that remain in the result."""
        return self.column_axes if self.contract_rows else self.row_axes

    @property
    def contracted_axes(self) -> slice:
        """The permuted axes of a component that the contraction sums over."""
        return self.row_axes if self.contract_rows else self.column_axes

    @property
    def free(self) -> Sizes:
        """The sizes of the free axes of the weight, in the order of storage."""
        return (*self.columns, *self.blocked) if self.contract_rows else self.rows

    @property
    def first_free(self) -> int | None:
        """The position in the result of the first free axis in storage.

        Only this axis stays split when the free axes are merged. None if there is no
        free axis, or if removing the padding would move its parts.
        """
        if not self.free or (self.contract_rows and self.padding):
            return None
        return self.out_order.index(self.num_lead)

    @property
    def _stack_counts(self) -> Sizes:
        return (len(self.stack),) if self.stack else ()

    @property
    def weight_counts(self) -> Sizes:
        """The numbers of permuted axes to merge into the stack, rows and columns."""
        return (*self._stack_counts, len(self.rows), len(self.columns) + 1)

    @property
    def blocked_counts(self) -> Sizes:
        """The numbers of axes to merge so that the blocked axes of the permuted
        activation become one, which is then padded."""
        return (*[1] * (self.num_lead + len(self.columns)), len(self.blocked))

    @property
    def x_counts(self) -> Sizes:
        """The numbers of axes of the activation to merge, after padding."""
        contracted = len(self.rows) if self.contract_rows else len(self.columns) + 1
        return (*self._stack_counts, len(self.tokens), contracted)

    @property
    def x_padding(self) -> tuple[tuple[int, int], ...]:
        """The argument of `jnp.pad` for the activation."""
        return (*[(0, 0)] * (self.num_lead + len(self.columns)), (0, self.padding))

    @property
    def size(self) -> int:
        """The number of values in a row of the blocked axes, without padding."""
        return math.prod(self.blocked)

    @property
    def out_shapes(self) -> tuple[Sizes, ...]:
        """The sizes to split each axis of the product into. The blocked axes are still
        one axis, with its padding."""
        last = (*self.columns, self.size + self.padding)
        lead = (self.stack, self.tokens) if self.stack else (self.tokens,)
        return (*lead, last if self.contract_rows else self.rows)

    @property
    def blocked_shapes(self) -> tuple[Sizes, ...]:
        """The sizes to split each axis of the result into, after `out_shapes`, if the
        blocked axes are free."""
        lead = (*self.stack, *self.tokens, *self.columns)
        return (*((size,) for size in lead), self.blocked)


def geometry(
    shape: Sequence[int],
    x_shape: Sequence[Any],
    blocked: Sequence[int],
    over: Pairs,
    batch: Pairs = (),
    padding: int = 0,
) -> Geometry:
    """Return the geometry of a contraction.

    **Arguments:**

    - `shape`: the shape of the quantized array.
    - `x_shape`: the shape of the activation.
    - `blocked`: the blocked axes, in the order of storage. All of them are contracted,
        or none.
    - `over`: pairs of axes to contract, of the array and of the activation.
    - `batch`: pairs of batch axes. None of them is blocked.
    - `padding`: the number of values that fill the last block.
    """
    x_axis_of = dict(over)
    batch_axes = [axis for axis, _ in batch]
    contract_rows = not any(axis in x_axis_of for axis in blocked)
    lead = [axis for axis in range(len(shape)) if axis not in blocked]
    contracted = [axis for axis in lead if axis in x_axis_of]
    free = [axis for axis in lead if axis not in {*contracted, *batch_axes}]
    rows, columns = (contracted, free) if contract_rows else (free, contracted)

    used = {axis for _, axis in (*over, *batch)}
    tokens = [axis for axis in range(len(x_shape)) if axis not in used]
    summed = rows if contract_rows else [*columns, *blocked]
    stored = [*columns, *blocked] if contract_rows else rows
    num_lead = len(batch) + len(tokens)
    sizes = lambda axes: tuple(shape[axis] for axis in axes)
    return Geometry(
        contract_rows=contract_rows,
        stack=sizes(batch_axes),
        tokens=tuple(x_shape[axis] for axis in tokens),
        rows=sizes(rows),
        columns=sizes(columns),
        blocked=sizes(blocked),
        padding=padding,
        weight_order=(
            *(lead.index(axis) for axis in (*batch_axes, *rows, *columns)),
            len(lead),
        ),
        x_order=(
            *(axis for _, axis in batch),
            *tokens,
            *(x_axis_of[axis] for axis in summed),
        ),
        out_order=(
            *range(num_lead),
            *(num_lead + stored.index(axis) for axis in sorted(stored)),
        ),
    )
