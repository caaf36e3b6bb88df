"""A walk through a jaxpr that finds the basis of each axis."""

import dataclasses
import itertools as it
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..._jax import Literal, open_jaxpr, split_scan, subjaxprs
from ._axis import added, Axis, Basis, PLAIN, Source, UNIFORM, ZERO
from ._rules import Axes, is_number, rules


def sources_of(jaxpr: Any, paths: Sequence[str | None]) -> list[list[Source]]:
    """Return the axes of each leaf of a model.

    All axes that must be rotated together have the same basis. An axis of size 1 has no
    source.

    **Arguments:**

    - `jaxpr`: a closed jaxpr.
    - `paths`: the path of each input that is a leaf; None for other inputs.
    """
    found, inputs = [], []
    for var, path in zip(open_jaxpr(jaxpr)[0].invars, paths, strict=True):
        shape = var.aval.shape
        axes = {}
        if path is not None:
            sources = [
                Source(path, len(shape), axis, Basis(size))
                for axis, size in enumerate(shape)
                if size > 1
            ]
            axes = {s.axis: Axis(s.basis, source=s, origin=s) for s in sources}
            found.append(sources)
        given = Axis(why="an input of the function")
        inputs.append(tuple(axes.get(axis, given) for axis in range(len(shape))))
    for axes in _Walk().run(jaxpr, inputs):
        for axis in axes:
            axis.kept("a result of the function")
    _settle([source for sources in found for source in sources])
    return found


def _settle(every: list[Source]) -> None:
    """Keep the basis of activations whose gain cannot move to the weights."""
    for source in every:
        if source.basis.block < 2:
            source.basis.keep("an odd size")
    while True:
        kept = sum(bool(source.basis.reason) for source in every)
        for source in every:
            if len(source.uses) > 1:
                source.basis.keep(
                    f"{source.path}, which is used with and without a gain"
                )
            for gain in filter(None, source.uses):
                if gain.source.uses != {gain}:
                    source.basis.keep(f"{gain.source.path}, which has other uses")
        for gain in {use for source in every for use in source.uses if use}:
            read = [s.basis for s in every if gain in s.uses and s is not gain.source]
            if any(basis.reason for basis in read):
                for basis in read:
                    basis.keep(f"{gain.source.path}, which has other uses")
        if sum(bool(source.basis.reason) for source in every) == kept:
            return


class _Walk:
    def __init__(self):
        self._scans = it.count()

    def run(self, jaxpr: Any, inputs: Sequence[Axes]) -> list[Axes]:
        """Return the axes of the results."""
        jaxpr, _ = open_jaxpr(jaxpr)
        known = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(var) -> Axes:
            if is_number(var):
                return (ZERO if var.val == 0 else UNIFORM,)
            constant = Axis(why="a constant")
            axes = (constant,) * len(getattr(var.aval, "shape", ()))
            return axes if isinstance(var, Literal) else known.get(var, axes)

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [_checked(v, read(v)) for v in eqn.invars])
            known.update(
                zip(eqn.outvars, map(_checked, eqn.outvars, outs), strict=True)
            )
        return [_checked(var, read(var)) for var in jaxpr.outvars]

    def _equation(self, eqn, values: list[Axes]) -> list[Axes]:
        name = eqn.primitive.name
        if name in _control:
            return _control[name](self, eqn, values)
        if name in rules:
            return rules[name](eqn, values)
        inner = list(subjaxprs(eqn.params))
        if name in _calls and len(inner) == 1:
            return self.run(inner[0], values)
        return rules[""](eqn, values)

    def _scan(self, eqn, values):
        consts, carry, xs = split_scan(eqn.params, values)
        scan = next(self._scans)
        carry = [_carried(axes) for axes in carry]
        outs = self.run(
            eqn.params["jaxpr"], [*consts, *carry, *(_sliced(x, scan) for x in xs)]
        )
        n = len(carry)
        # A scalar has one entry, and stacked scalars have one axis.
        ndims = [len(var.aval.shape) for var in eqn.outvars[n:]]
        ys = [
            (PLAIN, *(axis.used("`scan`") for axis in axes))[:ndim]
            for axes, ndim in zip(outs[n:], ndims, strict=True)
        ]
        return [*map(_joined, carry, outs[:n]), *ys]

    def _while(self, eqn, values):
        n = eqn.params["cond_nconsts"]
        m = n + eqn.params["body_nconsts"]
        carry = [_carried(axes) for axes in values[m:]]
        self.run(eqn.params["cond_jaxpr"], [*values[:n], *carry])
        outs = self.run(eqn.params["body_jaxpr"], [*values[n:m], *carry])
        return list(map(_joined, carry, outs))

    def _cond(self, eqn, values):
        branches = [self.run(x, values[1:]) for x in eqn.params["branches"]]
        first, *others = branches
        for other in others:
            first = list(map(_joined, first, other))
        return [tuple(axis.used("`cond`") for axis in axes) for axes in first]


_control = {"scan": _Walk._scan, "while": _Walk._while, "cond": _Walk._cond}
# Calls that pass their operands to one jaxpr, and return its results.
_calls = {
    "pjit",
    "jit",
    "closed_call",
    "core_call",
    "remat",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
}


def _checked(var, axes: Axes) -> Axes:
    """Return the axes of a value; those with one element are uniform."""
    shape = getattr(var.aval, "shape", ())
    if not shape:
        return axes[:1] if axes and axes[0].is_zero else (UNIFORM,)
    if not isinstance(getattr(var.aval, "dtype", None), jnp.dtype):
        return (PLAIN,) * len(shape)
    is_float = jnp.issubdtype(var.aval.dtype, jnp.floating)
    pairs = zip(shape, axes, strict=True)
    axes = tuple(UNIFORM if size == 1 else axis for size, axis in pairs)
    return axes if is_float else tuple(a.kept("it becomes integers") for a in axes)


def _joined(a: Axes, b: Axes) -> Axes:
    return tuple(added(x, y, "a loop or a branch") for x, y in zip(a, b, strict=True))


def _carried(axes: Axes) -> Axes:
    """Return the axes of the carry of a loop, which may vary after one step."""
    return tuple(Axis(axis.used("a loop").basis) for axis in axes)


def _sliced(axes: Axes, scan: int) -> Axes:
    """Return the axes of one step of a scanned input."""
    stack, *rest = axes
    stack.kept("`scan`")

    def chosen(axis: Axis) -> Axis:
        # The axes of stacks come first in a leaf, so that a gain of each layer can move
        # to the weight of that layer.
        source = stack.source
        if source is None or source.axis != len(axis.scans):
            axis = axis.moved("`scan`")
        return dataclasses.replace(axis, scans=(*axis.scans, scan))

    return tuple(map(chosen, rest))
