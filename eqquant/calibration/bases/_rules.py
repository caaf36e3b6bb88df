"""The axes of the results of each primitive, from the axes of its operands."""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..._jax import Literal
from ._axis import (
    added,
    Axis,
    contract,
    divided,
    multiplied,
    PLAIN,
    squared,
    UNIFORM,
    ZERO,
)


# One entry for each axis of a value. A scalar has one entry, which is uniform.
Axes = tuple[Axis, ...]
Rule = Callable[[Any, list[Axes]], list[Axes]]

rules: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(fn: Rule) -> Rule:
        rules.update(dict.fromkeys(names, fn))
        return fn

    return register


def is_number(var: Any) -> bool:
    """Return whether an operand is a number in the jaxpr."""
    return isinstance(var, Literal) and np.ndim(var.val) == 0


def _reason(eqn) -> str:
    return f"`{eqn.primitive.name}`"


def _aligned(eqn, values: list[Axes]) -> Iterator[tuple[Axis, ...]]:
    """Yield each axis of operands of one shape. Scalars are uniform."""
    ndim = len(eqn.outvars[0].aval.shape)
    pairs = zip(eqn.invars, values, strict=True)
    whole = [axes if var.aval.shape else axes * ndim for var, axes in pairs]
    return zip(*whole, strict=True)


@_rule("")
def _any(eqn, values):
    """Any function of all elements needs the original basis."""
    for axes in values:
        for axis in axes:
            axis.kept(_reason(eqn))
    plain = Axis(why=_reason(eqn))
    return [(plain,) * len(getattr(var.aval, "shape", ())) for var in eqn.outvars]


#
# Elements
#


@_rule(
    "convert_element_type",
    "copy",
    "copy_p",
    "name",
    "neg",
    "optimization_barrier",
    "reduce_precision",
    "sharding_constraint",
)
def _same(eqn, values):
    return values


@_rule("add", "add_any", "sub")
def _add(eqn, values):
    for axes, other in zip(values, eqn.invars[::-1], strict=True):
        if eqn.primitive.name == "add" and is_number(other):
            known = [axis for axis in axes if axis.basis is not None]
            if len(known) == 1 and known[0].vector is not None:
                number = float(other.val)
                return [
                    tuple(a if a.basis is None else a.shifted(number) for a in axes)
                ]
    return [tuple(added(a, b, _reason(eqn)) for a, b in _aligned(eqn, values))]


@_rule("mul")
def _mul(eqn, values):
    if eqn.invars[0] is eqn.invars[1]:
        return _square(eqn, values[:1])
    return [tuple(multiplied(a, b, _reason(eqn)) for a, b in _aligned(eqn, values))]


@_rule("div")
def _div(eqn, values):
    return [tuple(divided(a, b, _reason(eqn)) for a, b in _aligned(eqn, values))]


@_rule("square")
def _square(eqn, values):
    """The sum of squares is the same in each basis, if one axis is rotated."""
    (axes,) = values
    rotated = [axis for axis in axes if axis.basis is not None]
    if len(rotated) > 1 or any(axis.gain or axis.is_square for axis in rotated):
        return _any(eqn, values)
    used = (axis.used(_reason(eqn)) for axis in axes)
    return [tuple(a if a.basis is None else squared(a) for a in used)]


@_rule("integer_pow")
def _power(eqn, values):
    return (_square if eqn.params["y"] == 2 else _elements)(eqn, values)


@_rule(
    "abs",
    "and",
    "ceil",
    "clamp",
    "cos",
    "eq",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "ge",
    "gt",
    "is_finite",
    "le",
    "log",
    "log1p",
    "logistic",
    "lt",
    "max",
    "min",
    "ne",
    "not",
    "or",
    "pow",
    "rsqrt",
    "sign",
    "sin",
    "sqrt",
    "tanh",
)
def _elements(eqn, values):
    """Another function of each element."""
    outs = []
    for axes in _aligned(eqn, values):
        axes = [axis.kept(_reason(eqn)) for axis in axes]
        is_uniform = all(axis.is_uniform for axis in axes)
        outs.append(Axis(is_uniform=is_uniform, why=axes[0].why))
    return [tuple(outs)]


@_rule("select_n")
def _select(eqn, values):
    which, *cases = values
    outs = []
    for condition, *axes in _aligned(eqn, [which, *cases]):
        axis = ft.reduce(ft.partial(added, reason=_reason(eqn)), axes)
        if not condition.is_uniform:
            axis.kept(_reason(eqn))
            axis = Axis(why=axis.why or _reason(eqn))
        outs.append(axis)
    return [tuple(outs)]


@_rule("reduce_sum")
def _sum(eqn, values):
    (axes,) = values
    reduced = eqn.params["axes"]
    is_sum_of_squares = any(axis.is_square for axis in axes)
    rest = tuple(axis for i, axis in enumerate(axes) if i not in reduced)
    if is_sum_of_squares and not any(axis.is_square for axis in rest):
        return [rest]
    for i in reduced:
        axes[i].kept(_reason(eqn))
    return [tuple(axis.used(_reason(eqn)) for axis in rest)]


#
# Products
#


def _product(eqn, values, dimension_numbers, group: Sequence[int] = ()):
    reason = _reason(eqn)
    (contracted, batch), (left, right) = dimension_numbers, values[:2]
    for i, j in zip(*contracted, strict=True):
        contract(left[i], right[j], reason)
    for i, j in zip(*batch, strict=True):
        left[i].kept(reason)
        right[j].kept(reason)
    for j in group:
        right[j].kept(reason)
    bound = [{*contracted[0], *batch[0]}, {*contracted[1], *batch[1], *group}]
    free = [
        axis.used(reason)
        for axes, taken in zip((left, right), bound, strict=True)
        for i, axis in enumerate(axes)
        if i not in taken
    ]
    return [(*(PLAIN for _ in batch[0]), *free)]


@_rule("dot_general")
def _dot(eqn, values):
    return _product(eqn, values, eqn.params["dimension_numbers"])


@_rule("ragged_dot_general")
def _ragged_dot(eqn, values):
    """A product with one of some matrices for each row of the activation."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    group = numbers.rhs_group_dimensions
    if not group:
        return _any(eqn, values)
    return _product(eqn, values, numbers.dot_dimension_numbers, group)


#
# Structure
#


@_rule("broadcast_in_dim")
def _broadcast(eqn, values):
    shape, old = eqn.params["shape"], eqn.invars[0].aval.shape
    is_zero = all(axis.is_zero for axis in values[0])
    outs = [ZERO if is_zero else UNIFORM] * len(shape)
    for i, j in enumerate(eqn.params["broadcast_dimensions"]):
        outs[j] = values[0][i] if old[i] == shape[j] else UNIFORM
    return [tuple(outs)]


@_rule("transpose")
def _transpose(eqn, values):
    return [tuple(values[0][i] for i in eqn.params["permutation"])]


@_rule("squeeze")
def _squeeze(eqn, values):
    removed = [i % len(values[0]) for i in eqn.params["dimensions"]]
    return [tuple(axis for i, axis in enumerate(values[0]) if i not in removed)]


@_rule("reshape")
def _reshape(eqn, values):
    """Blocks of the last axis stay whole if they divide the new size."""
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if 0 in old:
        return _any(eqn, values)
    outs = [UNIFORM] * len(new)
    for before, after in _groups(old, new):
        if len(before) == len(after) == 1:
            outs[after[0]] = values[0][before[0]]
            continue
        *major, minor = (values[0][i] for i in before)
        axes = [axis.kept(_reason(eqn)) for axis in major]
        last = minor.used(_reason(eqn))
        if last.basis is not None:
            last.basis.limit(math.gcd(old[before[-1]], new[after[-1]]))
        is_uniform = last.is_uniform and all(axis.is_uniform for axis in axes)
        for i in after:
            outs[i] = Axis(is_uniform=is_uniform)
        outs[after[-1]] = Axis(last.basis, is_uniform)
    return [tuple(outs)]


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list, list]]:
    """Yield the smallest groups of axes of both shapes with the same elements, without
    axes of size 1."""
    sides = [[i for i, n in enumerate(shape) if n != 1] for shape in (old, new)]
    shapes, group, sizes = (old, new), ([], []), [1, 1]
    while any(sides):
        k = 0 if sides[0] and (sizes[0] <= sizes[1] or not sides[1]) else 1
        axis = sides[k].pop(0)
        group[k].append(axis)
        sizes[k] *= shapes[k][axis]
        if sizes[0] == sizes[1]:
            yield group
            group, sizes = ([], []), [1, 1]


@_rule("slice")
def _slice(eqn, values):
    shape, params = eqn.invars[0].aval.shape, eqn.params
    steps = params["strides"] or (1,) * len(shape)
    bounds = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    parts = zip(values[0], shape, bounds, strict=True)
    return [tuple(_sliced(eqn, axis, size, *b) for axis, size, b in parts)]


def _sliced(eqn, axis: Axis, size: int, start: int, limit: int, step: int) -> Axis:
    if (start, limit, step) == (0, size, 1):
        return axis
    if step != 1:
        return axis.kept(_reason(eqn))
    axis = axis.part(_reason(eqn))
    if axis.basis is not None:
        axis.basis.limit(math.gcd(start, limit))
    return axis


@_rule("dynamic_slice")
def _dynamic_slice(eqn, values):
    sizes = eqn.params["slice_sizes"]
    parts = zip(values[0], eqn.invars[0].aval.shape, sizes, strict=True)
    reason = _reason(eqn)
    return [tuple(a.moved(reason) if n == m else a.kept(reason) for a, n, m in parts)]


@_rule("dynamic_update_slice")
def _update(eqn, values):
    old, new = values[:2]
    shapes = (eqn.invars[0].aval.shape, eqn.invars[1].aval.shape)
    outs = []
    for a, b, n, m in zip(old, new, *shapes, strict=True):
        axis = added(a, b, _reason(eqn))
        outs.append(axis if n == m else Axis(axis.kept(_reason(eqn)).basis))
    return [tuple(outs)]


@_rule("concatenate")
def _concatenate(eqn, values):
    joined, outs = eqn.params["dimension"], []
    for i, axes in enumerate(zip(*values, strict=True)):
        axis = ft.reduce(ft.partial(added, reason=_reason(eqn)), axes)
        if i == joined and axis.basis is not None:
            axis.basis.limit(math.gcd(*(var.aval.shape[i] for var in eqn.invars)))
        outs.append(Axis(axis.basis, why=axis.why) if i == joined else axis)
    return [tuple(outs)]


@_rule("gather")
def _gather(eqn, values):
    """A lookup of rows takes whole axes of the table."""
    axes, numbers = values[0], eqn.params["dimension_numbers"]
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    outs, offsets = [PLAIN] * len(eqn.outvars[0].aval.shape), iter(numbers.offset_dims)
    for i, axis in enumerate(axes):
        whole = sizes[i] == shape[i] and i not in dropped
        axis = axis.moved(_reason(eqn)) if whole else axis.kept(_reason(eqn))
        if i not in dropped:
            # The rows are an activation.
            outs[next(offsets)] = dataclasses.replace(axis, origin=None)
    return [tuple(outs)]


@_rule("scatter-add")
def _scatter_add(eqn, values):
    """The sum of rows has the basis of the rows."""
    old, _, new = values
    numbers = eqn.params["dimension_numbers"]
    dropped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows, outs = list(numbers.update_window_dims), []
    for i, axis in enumerate(new):
        if i not in windows:
            axis.kept(_reason(eqn))
    offsets = iter(windows)
    for i, axis in enumerate(old):
        if i in dropped:
            outs.append(Axis(axis.kept(_reason(eqn)).basis))
            continue
        row = next(offsets)
        whole = eqn.invars[0].aval.shape[i] == eqn.invars[2].aval.shape[row]
        axis = added(axis, new[row], _reason(eqn))
        outs.append(Axis(axis.basis if whole else axis.kept(_reason(eqn)).basis))
    return [tuple(outs)]
