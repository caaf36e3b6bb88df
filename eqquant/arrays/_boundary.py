"""Weights that enter and leave a `shard_map`.

The stack of a view enters with the view. JAX splits the derivative of a `shard_map` in
two, and the first half passes its weights to the second half. A result that is an
operand stays outside, so that a layer of a stack stays a view, and a loop does not copy
it.
"""

import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.sharding import PartitionSpec

from .._jax import parts_of
from ..kernels import View
from ..partition import names_of
from ._implicit import ImplicitArray
from ._views import Exposed, is_viewable, Note, restored, Viewable


class PassedArray(ImplicitArray):
    """A result of `shard_map` for another `shard_map`. Any other use decodes it.

    **Fields:**

    - `source`: the views among the operands that are parts of the result, and for each
        other leaf the leaves of all devices, joined.
    - `structure`: the structure of the result on one device.
    - `spec`, `leaf_specs`: the split of the result, and of each leaf of `source`.
        Entries are counted from the end, so that a stack has the same split.
    - `call`: the arguments of `jax.shard_map`, without function and specs.
    """

    source: tuple[Any, ...]
    structure: Any = eqx.field(static=True)
    spec: PartitionSpec = eqx.field(static=True)
    leaf_specs: tuple[PartitionSpec, ...] = eqx.field(static=True)
    call: tuple = eqx.field(static=True)

    @property
    def _mesh(self) -> Any:
        return dict(self.call)["mesh"]

    @property
    def _leaves(self) -> list:
        return jax.tree.leaves(self.source)

    @property
    def _part(self) -> Any:
        """The types of the part on one device."""

        def struct(leaf, spec):
            counts = _counts(spec, leaf.ndim, self._mesh)
            shape = [n // m for n, m in zip(leaf.shape, counts, strict=True)]
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        return self.structure.unflatten(map(struct, self._leaves, self.leaf_specs))

    @property
    def is_whole(self) -> bool:
        return all(hasattr(leaf, "shape") for leaf in self._leaves)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self._part.shape
        counts = _counts(self.spec, len(shape), self._mesh)
        return tuple(n * m for n, m in zip(shape, counts, strict=True))

    @property
    def dtype(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._part.dtype

    def local(self) -> Any:
        """Return the part on this device, where the leaves are parts."""
        part = self.structure.unflatten(self._leaves)
        arrays, tree = jax.tree.flatten(part, is_leaf=is_viewable)
        restore = lambda x, old: x.with_note(old.note) if is_viewable(old) else x
        return tree.unflatten(map(restore, arrays, self.source))

    def dequantize(self) -> Any:
        decode = jax.shard_map(
            lambda *leaves: self.structure.unflatten(leaves).dequantize(),
            in_specs=tuple(self._split_leaves()),
            out_specs=_padded(self.spec, self.ndim),
            **dict(self.call),
        )
        return decode(*self._leaves)

    def _split_leaves(self) -> list[PartitionSpec]:
        leaves = zip(self._leaves, self.leaf_specs, strict=True)
        return [_padded(spec, leaf.ndim) for leaf, spec in leaves]

    def _specs(self, spec: PartitionSpec, mesh: Any, can: Callable) -> Any:
        own, ndim = _padded(self.spec, self.ndim), self.ndim
        if mesh != self._mesh or _names(spec, ndim) != _names(own, ndim):
            return NotImplemented
        return jax.tree.unflatten(jax.tree.structure(self), self._split_leaves())

    #
    # Nothing else is implemented
    #

    @property
    def is_scannable(self) -> bool:
        """Only a loop has added an axis in front."""
        return self.ndim > len(self.spec) and self._part.is_scannable

    @property
    def rounds_activations(self) -> bool:
        return self._part.rounds_activations

    @property
    def blocked_axes(self) -> tuple[int, ...]:
        return tuple(range(self.ndim))

    @property
    def whole_axes(self) -> int | None:
        return None

    def axes_of_parts(self, ndim: int, groups: Any) -> Any:
        return {"source": (None,)}

    def move(self, operation: Any) -> Any:
        return NotImplemented

    def concatenate(self, others: Any, dimension: int) -> Any:
        return NotImplemented

    def with_dtype(self, dtype: Any) -> Any:
        return NotImplemented

    def scale_parts(self, factor: Any, fn: Callable) -> Any:
        return NotImplemented

    def contract(self, x: Any, contraction: Any) -> Any:
        return NotImplemented


class Boundary:
    """The operands of one `shard_map`, and those of its results that are operands."""

    def __init__(self, **call: Any):
        """`call` has the arguments of `jax.shard_map`, without function and specs."""
        self._call = tuple(call.items())
        self._mesh = call["mesh"]
        self._views: list[tuple[Viewable, tuple[PartitionSpec, ...]]] = []
        # Structures of pytrees contain origins, and caches of `jax.jit` keep them.
        self._identity = object()

    def split(self, x: ImplicitArray, spec: PartitionSpec) -> Any:
        """Return the parts of an operand and their specs, or `NotImplemented` if `spec`
        does not split it."""
        specs = x.split_specs(spec, self._mesh)
        if specs is NotImplemented:
            return NotImplemented
        arrays, tree = jax.tree.flatten(x, is_leaf=is_viewable)
        split = tree.flatten_up_to(specs)
        for i, (array, of_array) in enumerate(zip(arrays, split, strict=True)):
            if not is_viewable(array) or array.note is None:
                continue
            if not _is_split_like_plan(array, of_array):
                arrays[i] = array.with_note(None)
                continue
            note = array.note.with_origin((self._identity, len(self._views)))
            arrays[i] = Exposed(array.with_note(None), note)
            split[i] = Exposed(of_array, _split_note(note, of_array))
            self._views.append((array, tuple(jax.tree.leaves(of_array))))
        return tree.unflatten(arrays), tree.unflatten(split)

    def local(self, x: Any) -> Any:
        """Return the part of an operand on this device."""
        is_passed = lambda x: isinstance(x, PassedArray)
        part = lambda x: x.local() if is_passed(x) else x
        is_leaf = lambda x: is_passed(x) or is_viewable(x)  # Others lose their views.
        return jax.tree.map(part, restored(x), is_leaf=is_leaf)

    def leave(self, x: ImplicitArray, spec: PartitionSpec) -> Any:
        """Return the parts of a result, their specs, and a function that makes the
        result from these parts, outside. Return `NotImplemented` if parts cannot
        leave."""
        arrays = jax.tree.leaves(x, is_leaf=is_viewable)
        places = [*map(self._place, arrays)]
        if all(place is None for place in places):
            specs = x.join_specs(spec, self._mesh)
            if specs is not NotImplemented:
                return x, specs, lambda x: x
        if not all(leaf.ndim for leaf in jax.tree.leaves(x)):
            return NotImplemented
        # Only the parts of the joined leaves have a meaning.
        names = tuple(itertools.chain(*map(names_of, spec)))
        split = lambda leaf: PartitionSpec(names, *[None] * (leaf.ndim - 1))
        parts, specs, sources, leaf_specs = [], [], [], []
        for array, place in zip(arrays, places, strict=True):
            if place is None:
                parts.append(array)
                specs.append(jax.tree.map(split, array))
                leaf_specs += jax.tree.leaves(specs[-1])
                sources.append(None)
            else:
                view, of_view = self._views[place]
                leaf_specs += of_view
                sources.append(view)
        spec = PartitionSpec(*spec, *[None] * (x.ndim - len(spec)))
        static = jax.tree.structure(x), spec, tuple(leaf_specs), self._call

        def outside(parts):
            rest = iter(parts)
            source = (next(rest) if view is None else view for view in sources)
            return PassedArray(tuple(source), *static)

        return parts, specs, outside

    def _place(self, x: Any) -> int | None:
        """Return the place of an array among the views that entered, or None."""
        note = x.note if is_viewable(x) else None
        identity, place = (note and note.origin) or (None, None)
        return place if identity is self._identity else None


def _split_note(note: Note, specs: Any) -> Note:
    """Return the note of a view whose leaves are specs. `specs` has the specs of the
    slice."""
    n = note.view.index.ndim
    of_stack = lambda spec: PartitionSpec(None, *spec[n + note.keeps_axis :])
    codes, *numbers = specs.stacked_parts
    first = PartitionSpec(*codes[:n])
    view = View(first, *jax.tree.map(of_stack, (codes, *numbers)))
    return Note(view, note.keeps_axis, note.origin)


def _is_split_like_plan(x: Any, specs: Any) -> bool:
    """Return whether `shard_map` splits a weight as it is. Otherwise a view would move
    the whole stack between devices, rather than one matrix."""
    ndim = x.codes.ndim
    return x.plan is None or x.plan.of(ndim) == _names(specs.codes, ndim)


def _padded(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """Add the entries of axes in front."""
    return PartitionSpec(*[None] * (ndim - len(spec)), *spec)


def _counts(spec: PartitionSpec, ndim: int, mesh: Any) -> list[int]:
    return [parts_of(mesh, entry) for entry in _padded(spec, ndim)]


def _names(spec: PartitionSpec, ndim: int) -> list:
    """Return the mesh axes of each axis."""
    return [*map(names_of, spec), *[()] * (ndim - len(spec))]
