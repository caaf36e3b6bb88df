"""The operands of `quantized_dot`: an activation, codes, and a pytree of the others.

With a [`View`][], the codes are its stack, so that no derivative holds a copy of one
matrix. The scales are always the scales of the product, because derivatives are with
respect to them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import spec_of
from ..kernels import View
from ._batching import map_first


def flatten(codes: Any, numbers: tuple, view: View | None) -> tuple[list, Any]:
    """Return the operands after the activation, and their structure `stored`. The
    numbers are scales, and offsets or None."""
    if view is None:
        parts, stored = jax.tree.flatten((numbers, None))
        return [codes, *parts], stored
    where = view.index, view.scales, view.offsets
    parts, stored = jax.tree.flatten((numbers, where))
    return [view.codes, *parts], stored


def unflatten(codes: Any, parts: Sequence, stored: Any) -> tuple[tuple, View | None]:
    """Return the numbers and the view."""
    numbers, where = stored.unflatten(parts)
    return numbers, None if where is None else View(where[0], codes, *where[1:])


def codes_of(codes: Any, view: View | None) -> Any:
    """Return the shape and dtype of the codes of a product, without its stack."""
    if view is None:
        return codes
    shape = *view.index.shape, *codes.shape[1:]
    return jax.ShapeDtypeStruct(shape, codes.dtype)


def map_view(size: int, view: View, dims: Sequence[int | None]) -> View | None:
    """Return the view of `size` products whose mapped axis is the first of the index.

    `dims` has the mapped axis of each leaf of the view. Stacks that are mapped become
    one stack. Return None if that would move their elements.
    """
    (index, *stacks), tree = jax.tree.flatten(view)
    index, of_stacks = map_first(size, index, dims[0]), set(dims[1:])
    if of_stacks == {0} and not any(spec_of(stacks[0])[:2]):
        count = stacks[0].shape[1]
        first = jnp.arange(size, dtype=index.dtype) * count
        index = jnp.clip(index, 0, count - 1)
        index = index + first.reshape(-1, *[1] * (index.ndim - 1))
        stacks = [a.reshape(-1, *a.shape[2:]) for a in stacks]
    elif of_stacks != {None}:
        return None
    return tree.unflatten([index, *stacks])


def without_offsets(view: View | None) -> View | None:
    return None if view is None else View(view.index, view.codes, view.scales)
