"""Views: arrays that were sliced from a stack, and remember where.

The parts of a view are ordinary slices. A product reads the stack in place instead, and
if nothing else uses the slices, the compiler drops them.

JAX transformations flatten arrays, and flattening drops the note. So a view never
leaves the function in which its index lives. The dispatcher carries views through the
calls and branches that it rebuilds, by [`exposed`][] and
[`restored`][].
"""

import abc
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from .._jax import as_varying, is_traced, varying_axes
from ..kernels import View
from ..partition import merge, split_by_type
from ._axes import DynamicSlice, Operation, Reshape, Slice, Squeeze


class Note(eqx.Module):
    """Where an array was sliced from. With `keeps_axis`, the array still has the axis
    of the stack, of size 1, after the axes of the index. `origin` identifies the stack
    of a loop, for [`without_views`][], or an operand of a `shard_map`."""

    view: View
    keeps_axis: bool = eqx.field(static=True, default=False)
    origin: Any = eqx.field(static=True, default=None)

    def with_origin(self, origin: Any) -> "Note":
        return Note(self.view, self.keeps_axis, origin)


class Viewable(eqx.Module):
    """An array that can be a view of a stack of arrays of its class.

    A subclass inherits from this class before the class that implements `move`.
    """

    # Not a field, so that flattening drops it, and not in `__dict__`, because Equinox
    # puts the size of that into the structure of a pytree.
    __slots__ = ("_slot",)

    @property
    @abc.abstractmethod
    def stacked_parts(self) -> tuple[Any, Any, Any]:
        """The codes, scales, and offsets or None. Their first axis is the first axis of
        the array, unless that is blocked."""

    @property
    def stack_view(self) -> View | None:
        """The stack of the codes and scales, or None."""
        note = self.note
        return None if note is None or note.keeps_axis else note.view

    @property
    def note(self) -> Note | None:
        return getattr(self, "_slot", None)

    def __getstate__(self):
        return self.__dict__  # Copies and pickles drop the note.

    def with_note(self: Any, note: Note | None) -> Any:
        """Return a copy with another note."""
        new = self.with_static()
        object.__setattr__(new, "_slot", note)
        return new

    def move(self: Any, operation: Operation) -> Any:
        """Apply a structural operation. A slice of one matrix is a view, and an
        operation that moves no element keeps a view."""
        out = super().move(operation)  # pyright: ignore
        if out is NotImplemented or out is self:
            return out
        is_one = out.shape == (1, *self.shape[1:]) and self.shape[0] > 1
        if isinstance(operation, Slice | DynamicSlice) and is_one:
            return noted(out, self, operation.start[0], keeps_axis=True)
        note = self.note
        if note is None:
            return out
        before, after = map(jax.tree.leaves, (self, out))
        if all(a is b for a, b in zip(before, after, strict=True)):
            return out.with_note(note)
        n = note.view.index.ndim
        with_axis = (*out.shape[:n], 1, *out.shape[n:])
        drops_axis = note.keeps_axis and self.shape == with_axis
        if drops_axis and isinstance(operation, Squeeze | Reshape):
            return out.with_note(Note(note.view))
        return out


def noted(
    part: Any, stack: Any, index: Any, keeps_axis: bool = False, origin: Any = None
) -> Any:
    """Return `part`, which is `stack[index]`, as a view if that can be one.

    Outside of a traced function it cannot, because it would keep the stack alive.
    """
    codes, *numbers = stack.stacked_parts
    if part.ndim - jnp.ndim(index) - keeps_axis < 2 or 0 in stack.blocked_axes:
        return part
    if not (is_traced(index) or is_traced(codes)):
        return part
    if split_by_type(codes)[0]:  # Other devices have the matrix.
        return part
    # Derivatives are with respect to the slices.
    numbers = jax.tree.map(lax.stop_gradient, numbers)
    size = codes.shape[0]
    place: Any = jnp.clip(jnp.asarray(index, jnp.int32), 0, size - 1)
    outer = stack.stack_view
    # A view of a view is a view of all matrices.
    if outer is not None and not outer.index.ndim:
        place = outer.index * size + place
        join = lambda a: merge(a, [2, *[1] * (a.ndim - 2)])
        stacks = outer.codes, outer.scales, outer.offsets
        codes, *numbers = jax.tree.map(join, stacks)
    return part.with_note(Note(View(place, codes, *numbers), keeps_axis, origin))


def as_views(
    parts: Any,
    stacks: Any,
    index: Int[Array, "*first"],
    keeps_axis: bool = False,
    loop: Any = None,
) -> Any:
    """Return a pytree that is `stacks[index]`, leaf by leaf, with its arrays as views.

    With `keeps_axis`, each part has an axis of size 1 after the axes of the index.
    `loop` identifies the loop whose counter is the index, for [`without_views`][].
    """
    count = itertools.count()

    def note(part, stack):
        origin = None if loop is None else (loop, next(count))
        if not is_viewable(part):
            return part
        return noted(part, stack, index, keeps_axis, origin)

    return jax.tree.map(note, parts, stacks, is_leaf=is_viewable)


def without_views(tree: Any, loop: Any) -> tuple[Any, Any]:
    """Remove the views of the stacks of a loop from a result of its body, so that the
    loop does not copy them. Return the rest, and the argument of [`with_stacks`][].
    """

    def origin_of(x):
        note = x.note if is_viewable(x) else None
        origin = None if note is None else note.origin
        return origin if origin is not None and origin[0] is loop else None

    leaves, tree_of = jax.tree.flatten(tree, is_leaf=is_viewable)
    origins = [origin_of(x) for x in leaves]
    removed = [
        None
        if origin is None
        else (
            origin[1],
            jax.tree.structure(x),
            [*map(varying_axes, jax.tree.leaves(x))],
        )
        for x, origin in zip(leaves, origins, strict=True)
    ]
    kept = [x for x, of in zip(leaves, removed, strict=True) if of is None]
    return kept, (tree_of, removed)


def with_stacks(kept: list, removed: Any, stacks: Any) -> Any:
    """Invert [`without_views`][] after the loop: the views are their stacks."""
    tree_of, places = removed
    rest, leaves = iter(kept), jax.tree.leaves(stacks, is_leaf=is_viewable)

    def stack_of(place, structure, axes):
        return structure.unflatten(
            map(as_varying, jax.tree.leaves(leaves[place]), axes)
        )

    filled = [next(rest) if of is None else stack_of(*of) for of in places]
    return tree_of.unflatten(filled)


class Exposed(eqx.Module):
    """A view as a pytree."""

    array: Any
    note: Note


def without_origins(tree: Any) -> Any:
    """Return a pytree whose views differ from the slices of their loops."""

    def forget(x):
        note = x.note if is_viewable(x) else None
        if note is None:
            return x
        return x.with_note(note.with_origin(None))

    return jax.tree.map(forget, tree, is_leaf=is_viewable)


def exposed(tree: Any) -> Any:
    """Replace views by pytrees that contain their stacks."""

    def expose(x):
        note = x.note if is_viewable(x) else None
        return x if note is None else Exposed(x.with_note(None), note)

    return jax.tree.map(expose, tree, is_leaf=is_viewable)


def restored(tree: Any) -> Any:
    """Invert [`exposed`][]."""
    is_leaf = lambda x: isinstance(x, Exposed)
    restore = lambda x: x.array.with_note(x.note) if is_leaf(x) else x
    return jax.tree.map(restore, tree, is_leaf=is_leaf)


def is_viewable(x: Any) -> bool:
    return isinstance(x, Viewable) and all(
        hasattr(part, "shape") for part in x.stacked_parts[:2]
    )
