"""Which axes of a mesh split a weight, and what multiplies it."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import AbstractMesh


Names = tuple[str, ...]


def names_of(entry: Any) -> Names:
    """The mesh axes of an entry of a `PartitionSpec`."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a quantized weight is split over a mesh.

    On one with automatic axes the array has a plan. On one with explicit axes the types
    of both operands say how they are split; there `batch` and `scatter` come from the
    sharding that is asked for the result.

    A plan decides where a product is computed, never what it is: an axis that does not
    divide is not split, and values that lie elsewhere are moved.

    **Fields:**

    - `mesh`: the mesh.
    - `axes`: for each axis of the codes, the mesh axes that split it. They are counted
        from the end, so that the plan of a stack is that of each of its matrices.
    - `batch`: the mesh axes that split the rows of an activation. A weight that these
        split, too, is gathered before it is multiplied, packed.
    - `scatter`: the mesh axes that may split the rows and the columns of a result, if
        it is summed over them: a reduce-scatter. Over others all devices have the sum.
    - `whole_scales`: whether scales are gathered over `batch` before a product.
    """

    mesh: AbstractMesh
    axes: tuple[Names, ...]
    batch: Names = ()
    scatter: tuple[Names, Names] = ((), ())
    whole_scales: bool = False

    def of(self, ndim: int) -> list[Names]:
        """The mesh axes of each of the last `ndim` axes of the codes."""
        missing = max(ndim - len(self.axes), 0)
        return [()] * missing + list(self.axes[len(self.axes) + missing - ndim :])

    def _with(self, ndim: int, axes: Sequence[Names]) -> "Plan":
        """The last `ndim` axes replaced."""
        before = self.axes[: max(len(self.axes) - ndim, 0)]
        return dataclasses.replace(self, axes=(*before, *axes))

    def permuted(self, order: Sequence[int]) -> "Plan":
        """After the transpose of codes with as many axes as `order` has."""
        axes = self.of(len(order))
        return self._with(len(order), [axes[i] for i in order])

    def picked(self, ndim: int, axes: Sequence[int | None]) -> "Plan":
        """Of codes that had `ndim` axes, and now have these; None for a new one."""
        old = self.of(ndim)
        return self._with(ndim, [() if i is None else old[i] for i in axes])

    def reshaped(self, old: Sequence[int], new: Sequence[int]) -> "Plan":
        """After a reshape. Of axes that are merged the first may be split."""
        axes = self.of(len(old))
        out: list[Names] = [()] * len(new)
        for before, after in aligned(old, new):
            first = [i for i in before if old[i] > 1][:1]
            onto = [j for j in after if new[j] > 1][:1]
            for i, j in zip(first, onto, strict=False):
                out[j] = axes[i]
        return self._with(len(old), out)


def aligned(
    old: Sequence[int], new: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of axes of both shapes that hold the same elements."""
    i = j = 0
    while i < len(old) and j < len(new):
        before, after = [i], [j]
        i, j = i + 1, j + 1
        while math.prod(old[k] for k in before) != math.prod(new[k] for k in after):
            if math.prod(old[k] for k in before) < math.prod(new[k] for k in after):
                before.append(i)
                i += 1
            else:
                after.append(j)
                j += 1
        yield before, after
    yield list(range(i, len(old))), list(range(j, len(new)))  # Ones.
