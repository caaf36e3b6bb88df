"""Merge axes of arrays on a mesh with explicit axes, and split them again.

A reshape keeps only the first of several merged axes split. The order of the rows of a
product is free, however. So the parts of all axes come first in a merged axis, followed
by the positions inside of a part. The values of each device stay together, and no
collective is needed.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from .._jax import explicit_mesh_of, mapped_mesh_axes, parts_of, spec_of
from ._plan import Names, names_of


@dataclasses.dataclass(frozen=True)
class Parts:
    """How explicit mesh axes split the axes of an array.

    **Fields:**

    - `names`: the mesh axes that split each axis.
    - `counts`: the number of parts that decides the order of a merged axis.
    """

    names: tuple[Names, ...]
    counts: tuple[int, ...]

    def __getitem__(self, axes: slice) -> "Parts":
        return Parts(self.names[axes], self.counts[axes])

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(self.names + other.names, self.counts + other.counts)

    @staticmethod
    def whole(ndim: int) -> "Parts":
        """Axes that are not split."""
        return Parts(((),) * ndim, (1,) * ndim)

    def split_further(self, axis: int, names: Names, mesh: Any) -> "Parts":
        """Also split one axis over the mesh axes `names`."""
        new_names, counts = list(self.names), list(self.counts)
        new_names[axis] = *new_names[axis], *names
        counts[axis] *= parts_of(mesh, names)
        return Parts(tuple(new_names), tuple(counts))

    def with_whole_blocks(self, blocks: int) -> "Parts":
        """Do not order the last axis by its parts unless they divide `blocks`."""
        if blocks % self.counts[-1] == 0:
            return self
        return dataclasses.replace(self, counts=(*self.counts[:-1], 1))


def split_by_type(x: Shaped[Array, "..."]) -> list[Names]:
    """Return the explicit mesh axes that split each axis of `x`.

    Mesh axes that split the mapped axis of an outer `jax.vmap` are left out, because a
    mesh axis can split only one axis.
    """
    if explicit_mesh_of(x) is None:
        return [()] * x.ndim
    mapped = mapped_mesh_axes()
    return [
        tuple(name for name in names_of(entry) if name not in mapped)
        for entry in spec_of(x)
    ]


def parts_by_type(x: Shaped[Array, "..."]) -> Parts:
    """Return how explicit mesh axes split `x`."""
    mesh, names = explicit_mesh_of(x), split_by_type(x)
    counts = (1 if mesh is None else parts_of(mesh, entry) for entry in names)
    return Parts(tuple(names), tuple(counts))


def merge(
    x: Shaped[Array, "..."], counts: Sequence[int], parts: Parts | None = None
) -> Shaped[Array, "..."]:
    """Merge each run of neighbouring axes into one axis.

    **Arguments:**

    - `counts`: the number of axes in each run. A run of 0 becomes an axis of size 1.
    - `parts`: the parts that decide the order of values in a merged axis. By default
        the parts that `x` has. If a merged axis is split otherwise, gather it first.
    """
    names, order, runs = _merged(x, counts, parts)
    shape = [math.prod(x.shape[i] for i in run) for run in runs]
    merged = [sum((names[i] for i in run), ()) for run in runs]
    if not _in_order(runs, x.shape, order):
        axes = zip(x.shape, order, strict=True)
        shape_of_parts = [n for size, k in axes for n in (k, size // k)]
        x = _reshape(x, shape_of_parts, [e for entry in names for e in (entry, ())])
        x = jnp.transpose(x, _parts_first(runs))
    return _reshape(x, shape, merged)


def merge_moves(
    x: Shaped[Array, "..."], counts: Sequence[int], parts: Parts | None = None
) -> bool:
    """Return whether `merge` permutes or gathers values of `x`."""
    names, order, runs = _merged(x, counts, parts)
    return names != split_by_type(x) or not _in_order(runs, x.shape, order)


def _merged(x: Shaped[Array, "..."], counts: Sequence[int], parts: Parts | None):
    """Return the names and the numbers of parts of all axes of `x` before a merge, and
    the axes in each run."""
    by_type = parts_by_type(x)
    names, own = list(by_type.names), list(by_type.counts)
    order = list(own if parts is None else parts.counts)
    runs = _runs(counts)
    for axis in range(x.ndim):
        if [axis] in runs:
            order[axis] = own[axis]
        elif order[axis] % own[axis]:
            names[axis] = ()
    return names, order, runs


def split(
    x: Shaped[Array, "..."], shapes: Sequence[Sequence[Any]], parts: Parts
) -> Shaped[Array, "..."]:
    """Split each axis that `merge` made into axes of the sizes in `shapes`.

    `parts` describes the axes before the merge. Each axis keeps the mesh axes that
    still split the merged axis.
    """
    runs = _runs(list(map(len, shapes)))
    counts, names = list(parts.counts), list(parts.names)
    own = parts_by_type(x)
    for run, remaining, count in zip(runs, own.names, own.counts, strict=True):
        if len(run) == 1:
            names[run[0]], counts[run[0]] = remaining, count
        for i in run:
            names[i] = tuple(name for name in names[i] if name in remaining)
    sizes = [size for shape in shapes for size in shape]
    if not _in_order(runs, sizes, counts):
        order = _parts_first(runs)
        axes = zip(sizes, counts, strict=True)
        shape_of_parts = [n for size, k in axes for n in (k, size // k)]
        entries = [e for entry in names for e in (entry, ())]
        x = _reshape(x, [shape_of_parts[i] for i in order], [entries[i] for i in order])
        x = jnp.transpose(x, [order.index(i) for i in range(len(order))])
    return _reshape(x, sizes, names)


def _runs(counts: Sequence[int]) -> list[list[int]]:
    """Return the axes in each run."""
    axes = iter(range(sum(counts)))
    return [[next(axes) for _ in range(count)] for count in counts]


def _in_order(runs: list[list[int]], sizes: Sequence[Any], parts: list[int]) -> bool:
    """Return whether a plain reshape already places the parts first."""

    def run_in_order(run):
        # Sizes may be symbolic, and `>` of symbols raises.
        inner = [i for i in run if sizes[i] != parts[i]]
        return all(parts[i] == 1 for i in run if inner and i > inner[0])

    return all(map(run_in_order, runs))


def _parts_first(runs: list[list[int]]) -> list[int]:
    """Return the order that moves parts first, for axes `(parts, inside of a part)`."""
    return [2 * i + inner for run in runs for inner in (0, 1) for i in run]


def _reshape(x: Any, shape: Sequence[Any], names: Sequence[Names]) -> Any:
    mesh = explicit_mesh_of(x)
    if mesh is None:
        return x.reshape(shape)
    spec = PartitionSpec(*(entry or None for entry in names))
    if tuple(shape) == x.shape:
        same = split_by_type(x) == list(names)
        return x if same else jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return lax.reshape(x, shape, out_sharding=NamedSharding(mesh, spec))
