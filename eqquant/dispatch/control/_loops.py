"""Loops and branches: `scan`, `while_loop` and `switch`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from ..._jax import Literal, open_jaxpr, split_scan, type_of_first
from ...arrays import (
    as_views,
    exposed,
    ImplicitArray,
    is_implicit,
    restored,
    with_stacks,
    without_views,
)
from .._interpreter import Interpreter
from ..rules import control_rule_for


def _is_like(a, b) -> bool:
    """Return whether a loop with carry `a` can return `b`: alike, or both plain."""
    if is_implicit(a) or is_implicit(b):
        return jax.tree.structure(a) == jax.tree.structure(b) and all(
            x.shape == y.shape and x.dtype == y.dtype
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        )
    return True


def _traced(fn: Callable, *args) -> tuple[Callable, Any]:
    """Trace a function once. Return a function that evaluates its jaxpr, and the shapes
    of its results.

    A loop or branch traces its body again, so that nested ones would otherwise be
    interpreted a number of times that doubles with the depth.
    """
    jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    evaluate, tree = jaxpr_as_fun(jaxpr), jax.tree.structure(shapes)
    return lambda *args: tree.unflatten(evaluate(*jax.tree.leaves(args))), shapes


def _settle(interpreter: Interpreter, eqn, body: Callable, carry: list, *xs):
    """Return a carry whose arrays have the same kinds before and after the body, and
    the body, `(carry, *xs) -> (carry, ys)`, for this carry.

    An array that the body replaces by a plain array is decoded before the loop.
    """
    carry, traced = list(carry), body
    while any(map(is_implicit, carry)):
        traced, (out, _) = _traced(body, carry, *xs)
        changed = [
            i
            for i, (a, b) in enumerate(zip(carry, out, strict=True))
            if is_implicit(a) and not _is_like(a, b)
        ]
        if not changed:
            break
        traced = body
        for i in changed:
            carry[i] = interpreter.dense(eqn, carry[i])
    quantized = [is_implicit(a) for a in carry]

    def agreeing(carry, *xs):
        out, ys = traced(carry, *xs)
        both = zip(quantized, out, strict=True)
        return [b if q else interpreter.dense(eqn, b) for q, b in both], ys

    carry = [a if is_implicit(a) else jnp.asarray(a) for a in carry]
    return carry, agreeing


@control_rule_for("scan")
def _scan(interpreter: Interpreter, eqn, args):
    params = eqn.params
    fn = interpreter.function(params["jaxpr"])
    consts, carry, xs = split_scan(params, args)
    slices = lambda x: not isinstance(x, ImplicitArray) or x.is_scannable
    xs = [x if slices(x) else interpreter.dense(eqn, x) for x in xs]
    n, indices = len(carry), jnp.arange(params["length"], dtype=jnp.int32)
    loop, removed = object(), []

    def body(carry, inputs):
        index, parts = inputs
        out = fn(*consts, *carry, *as_views(parts, xs, index, loop=loop))
        kept, removed[:] = without_views(out[n:], loop)
        return out[:n], kept

    first = jax.tree.map(type_of_first, (indices, xs))
    carry, step = _settle(interpreter, eqn, body, carry, first)
    carry, ys = lax.scan(
        step,
        carry,
        (indices, xs),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *with_stacks(ys, removed, xs)]


@control_rule_for("while")
def _while(interpreter: Interpreter, eqn, args):
    params = eqn.params
    condition = interpreter.function(params["cond_jaxpr"])
    step = interpreter.function(params["body_jaxpr"])
    n, m = params["cond_nconsts"], params["body_nconsts"]
    condition_consts, step_consts, carry = args[:n], args[n : n + m], args[n + m :]

    def body(carry):
        return step(*step_consts, *carry), None

    # `vmap` of a loop makes one loop with a predicate for each element.
    ndim = open_jaxpr(params["cond_jaxpr"])[0].outvars[0].aval.ndim
    if ndim:
        first = lambda x: not is_implicit(x) or (ndim == 1 and x.is_scannable)
        carry = [x if first(x) else interpreter.dense(eqn, x) for x in carry]
    carry, agreeing = _settle(interpreter, eqn, body, carry)
    goes_on = lambda carry: condition(*condition_consts, *carry)[0]

    def advance(carry):
        new = agreeing(carry)[0]
        if not ndim:
            return new
        going = goes_on(carry)
        return jax.tree.map(lambda *both: _where_first(going, *both), new, carry)

    one = (lambda carry: jnp.any(goes_on(carry))) if ndim else goes_on
    return lax.while_loop(one, advance, carry)


def _where_first(which, x, y):
    """Select by the first axes of two arrays."""
    axes = range(which.ndim)
    return lax.select(lax.broadcast_in_dim(which, x.shape, axes), x, y)


@control_rule_for("cond")
def _cond(interpreter: Interpreter, eqn, args):
    index, *operands = args
    jaxprs = eqn.params["branches"]
    zeros = [_zeros_among(jaxpr) for jaxpr in jaxprs]
    operands = exposed(operands)
    inner = lambda jaxpr: lambda *args: interpreter.evaluate(jaxpr, *restored(args))
    traced = [_traced(inner(jaxpr), *operands) for jaxpr in jaxprs]
    branches, outs = zip(*traced, strict=True)
    columns = zip(zip(*outs, strict=True), zip(*zeros, strict=True), strict=True)
    common = [_common(outs, zero) for outs, zero in columns]

    def agreeing(branch):
        def fn(*operands):
            return [
                interpreter.dense(eqn, out) if kind is None else _as_kind(kind, out)
                for kind, out in zip(common, branch(*operands), strict=True)
            ]

        return fn

    return lax.switch(index, [agreeing(branch) for branch in branches], *operands)


def _zeros_among(jaxpr) -> list[bool]:
    """Return which results of a jaxpr are zeros or unused.

    When JAX differentiates a `cond`, branches that use a weight return the weight, and
    all other branches return such a zero.
    """
    jaxpr, _ = open_jaxpr(jaxpr)
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def is_zero(var) -> bool:
        if isinstance(var, Literal):
            return not np.any(var.val)
        if var not in made_by:
            return False
        eqn = made_by[var]
        if eqn.primitive.name in ("empty", "empty2"):
            return True
        return eqn.primitive is lax.broadcast_in_dim_p and is_zero(eqn.invars[0])

    return [is_zero(var) for var in jaxpr.outvars]


def _common(outs: Sequence, zeros: Sequence[bool]) -> ImplicitArray | None:
    """Return the implicit array that a result resembles in every branch.

    The result may be zero in some branches. Return None if it is plain, or if branches
    differ.
    """
    kinds = [out for out in outs if is_implicit(out)]
    if not kinds or not all(_is_like(kinds[0], kind) for kind in kinds):
        return None
    fits = [is_implicit(out) or z for out, z in zip(outs, zeros, strict=True)]
    return kinds[0] if all(fits) else None


def _as_kind(kind: ImplicitArray, out):
    if is_implicit(out):
        return out
    # Zero scales decode to zero.
    return jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), kind)
