"""Read the parts of a large array on all cores, each straight into its place."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from ._mapped import release
from ._memory import empty


class Part(NamedTuple):
    """A part of an array.

    **Fields:**

    - `name`: its name in errors.
    - `place`: the indices of its leading axes, and possibly a slice of the next axis.
    - `read`: returns an array, or a pytree of arrays with the same leading axes. Its
        argument is `None` or has contiguous arrays for the result, if the part has the
        format of the first part. `read` may write to them and return their memory.
    """

    name: str
    place: tuple[int | slice, ...]
    read: Callable[[Any], Any]


def cannot_concatenate(name: str) -> ValueError:
    return ValueError(
        f"{name!r} cannot be concatenated with others, because its rows share scales."
    )


def fill(lead: tuple[int, ...], parts: Sequence[Part], *, threads: int = 0) -> Any:
    """Return the whole array, in NumPy. Only one copy of it is in memory.

    **Arguments:**

    - `lead`: the sizes of the axes that the places index.
    - `parts`: parts that cover the array.
    - `threads`: 0 for a thread per core.
    """
    first, *rest = parts
    if not first.place:
        return jax.tree.map(np.asarray, first.read(None))
    leaves, treedef = jax.tree.flatten(first.read(None))
    sliced = sum(isinstance(index, slice) for index in first.place)
    kinds = [(leaf.shape[sliced:], leaf.dtype) for leaf in leaves]
    wholes = [empty((*lead, *shape), dtype) for shape, dtype in kinds]

    def put(part: Part, leaves: Sequence[Any]) -> None:
        for whole, leaf in zip(wholes, leaves, strict=True):
            place = whole[(*part.place, ...)]
            if place.shape != leaf.shape:
                raise cannot_concatenate(part.name)
            if not np.may_share_memory(place, leaf):
                place[...] = leaf
                release(leaf)

    def read(part: Part) -> None:
        places = [whole[(*part.place, ...)] for whole in wholes]
        out = jax.tree.unflatten(treedef, places)
        leaves, found = jax.tree.flatten(part.read(out))
        if found != treedef or kinds != [(x.shape[sliced:], x.dtype) for x in leaves]:
            raise ValueError(
                f"{part.name!r} and {first.name!r} have different formats, so they "
                "cannot be stacked."
            )
        put(part, leaves)

    put(first, leaves)
    if threads == 1 or len(rest) < 2:
        for part in rest:
            read(part)
    else:
        with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
            for done in [pool.submit(read, part) for part in rest]:
                done.result()
    return jax.tree.unflatten(treedef, wholes)
