"""Plans: the mesh axes that split a weight and its activations."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import AbstractMesh


Names = tuple[str, ...]


def names_of(entry: Any) -> Names:
    """Return the mesh axes in an entry of a `PartitionSpec`."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sharding of a quantized weight over a mesh.

    On a mesh with automatic axes, the array carries a plan. On a mesh with explicit
    axes, the types of both operands contain their shardings; then `batch` and
    `scatter` come from the requested sharding of the result.

    A plan determines where a product is computed, and never changes its value. An axis
    whose size is not divisible is replicated, and values on other devices are moved.

    **Fields:**

    - `mesh`: the mesh.
    - `axes`: for each axis of the codes, the mesh axes that split it. Axes are counted
        from the end, so that a stack and each of its matrices have the same plan.
    - `batch`: the mesh axes that split the rows of an activation. If they also split
        the weight, its packed codes are gathered before a product.
    - `scatter`: the mesh axes over which a sum is scattered along the rows and the
        columns of a result (a reduce-scatter). For all other mesh axes, every device
        has the sum (an all-reduce).
    - `whole_scales`: whether scales are gathered over `batch` before a product.
    """

    mesh: AbstractMesh
    axes: tuple[Names, ...]
    batch: Names = ()
    scatter: tuple[Names, Names] = ((), ())
    whole_scales: bool = False

    def of(self, ndim: int) -> list[Names]:
        """Return the mesh axes of each of the last `ndim` axes of the codes."""
        missing = max(ndim - len(self.axes), 0)
        return [()] * missing + list(self.axes[len(self.axes) + missing - ndim :])

    def _with(self, ndim: int, axes: Sequence[Names]) -> "Plan":
        """Replace the last `ndim` axes."""
        before = self.axes[: max(len(self.axes) - ndim, 0)]
        return dataclasses.replace(self, axes=(*before, *axes))

    def permuted(self, order: Sequence[int]) -> "Plan":
        """Return the plan after a transpose of the codes by `order`."""
        return self.picked(len(order), order)

    def picked(self, ndim: int, axes: Sequence[int | None]) -> "Plan":
        """Return the plan of codes that keep these of their `ndim` axes; None is a new
        axis."""
        if list(axes) == list(range(ndim)):
            return self
        old = self.of(ndim)
        return self._with(ndim, [() if i is None else old[i] for i in axes])

    def reshaped(self, old: Sequence[int], new: Sequence[int]) -> "Plan":
        """Return the plan after a reshape. Only the first of merged axes stays
        split."""
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
    """Yield the smallest runs of axes of both shapes with the same elements."""
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
    yield list(range(i, len(old))), list(range(j, len(new)))  # Axes of size 1.
