"""Axes that are merged to one, and taken apart again, on meshes with explicit axes.

A reshape keeps an axis split only if it is the first of those that are merged with it.
But the rows of a product may be in any order. So here what one device has stays
together: parts of axes come first, then what is in them, and nothing moves.
"""

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


def split_by_type(x: Shaped[Array, "..."]) -> list[Names]:
    """The explicit mesh axes that split each axis, but for those that split what a
    `jax.vmap` around maps over: each can split one axis only."""
    if explicit_mesh_of(x) is None:
        return [()] * x.ndim
    mapped = mapped_mesh_axes()
    left = lambda names: tuple(name for name in names if name not in mapped)
    return [left(names_of(entry)) for entry in spec_of(x)]


def parts_by_type(x: Shaped[Array, "..."]) -> list[int]:
    """In how many parts these split each axis."""
    mesh = explicit_mesh_of(x)
    return [1 if mesh is None else parts_of(mesh, names) for names in split_by_type(x)]


def merge(
    x: Shaped[Array, "..."], counts: Sequence[int], parts: Sequence[int] | None = None
) -> Shaped[Array, "..."]:
    """Merge runs of neighbours, of so many axes each; a run of none becomes an axis of
    size 1. In how many `parts` axes are seen decides the order: by default as many as
    there are. What is split otherwise, and merged, is gathered."""
    names, own = split_by_type(x), parts_by_type(x)
    parts = list(own if parts is None else parts)
    runs = _runs(counts)
    for axis in range(x.ndim):
        if [axis] in runs:
            parts[axis] = own[axis]
        elif parts[axis] % own[axis]:
            names[axis] = ()
    shape = [math.prod(x.shape[i] for i in run) for run in runs]
    merged = [sum((names[i] for i in run), ()) for run in runs]
    if not _in_order(runs, x.shape, parts):
        each = zip(x.shape, parts, strict=True)
        seen = [n for size, k in each for n in (k, size // k)]
        x = _reshape(x, seen, [entry for of in names for entry in (of, ())])
        x = jnp.transpose(x, _parts_first(runs))
    return _reshape(x, shape, merged)


def split(
    x: Shaped[Array, "..."],
    shapes: Sequence[Sequence[int]],
    parts: Sequence[int],
    names: Sequence[Names],
) -> Shaped[Array, "..."]:
    """Take each axis apart into axes of these sizes, as `merge` made it of axes in so
    many `parts`. Of the mesh axes that split it still, each gets those in `names`."""
    runs = _runs(list(map(len, shapes)))
    parts, names = list(parts), list(names)
    by_type = zip(split_by_type(x), parts_by_type(x), strict=True)
    for run, (left, own) in zip(runs, by_type, strict=True):
        if len(run) == 1:
            names[run[0]], parts[run[0]] = left, own
        for i in run:
            names[i] = tuple(name for name in names[i] if name in left)
    sizes = [size for shape in shapes for size in shape]
    if not _in_order(runs, sizes, parts):
        order = _parts_first(runs)
        seen = [n for size, k in zip(sizes, parts, strict=True) for n in (k, size // k)]
        entries = [entry for of in names for entry in (of, ())]
        x = _reshape(x, [seen[i] for i in order], [entries[i] for i in order])
        x = jnp.transpose(x, [order.index(i) for i in range(len(order))])
    return _reshape(x, sizes, names)


def _runs(counts: Sequence[int]) -> list[list[int]]:
    """The axes in each run."""
    axes = iter(range(sum(counts)))
    return [[next(axes) for _ in range(count)] for count in counts]


def _in_order(runs: list[list[int]], sizes: Sequence[int], parts: list[int]) -> bool:
    """Whether parts come first as it is."""

    def of_run(run):
        inner = [i for i in run if sizes[i] > parts[i]]
        return all(parts[i] == 1 for i in run if inner and i > inner[0])

    return all(map(of_run, runs))


def _parts_first(runs: list[list[int]]) -> list[int]:
    """The order of axes `(parts, in a part)` for each axis."""
    return [2 * i + inner for run in runs for inner in (0, 1) for i in run]


def _reshape(x: Any, shape: Sequence[int], names: Sequence[Names]) -> Any:
    mesh = explicit_mesh_of(x)
    if mesh is None:
        return x.reshape(shape)
    spec = PartitionSpec(*(of or None for of in names))
    if tuple(shape) == x.shape:
        same = split_by_type(x) == list(names)
        return x if same else jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return lax.reshape(x, shape, out_sharding=NamedSharding(mesh, spec))
