"""Loops and branches: `scan`, `while_loop`, `switch`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ..._jax import split_scan
from ...arrays import is_implicit
from .._interpreter import Interpreter
from ..rules import control_rule_for


def _is_like(a, b) -> bool:
    """Whether a loop can carry `a` and get `b`: the same, or both plain."""
    if is_implicit(a) or is_implicit(b):
        return jax.tree.structure(a) == jax.tree.structure(b) and all(
            x.shape == y.shape and x.dtype == y.dtype
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        )
    return True


def _settle(interpreter: Interpreter, eqn, body: Callable, carry: list):
    """A carry that stays as it is: what the body replaces by a plain array starts as
    one. Also the body, changed to agree where the carry starts as a plain array."""
    carry = list(carry)
    while any(map(is_implicit, carry)):
        out = jax.eval_shape(body, carry)
        changed = [
            i
            for i, (a, b) in enumerate(zip(carry, out, strict=True))
            if is_implicit(a) and not _is_like(a, b)
        ]
        if not changed:
            break
        for i in changed:
            carry[i] = interpreter.dense(eqn, carry[i])
    quantized = [is_implicit(a) for a in carry]

    def agree(out):
        return [
            b if q else interpreter.dense(eqn, b)
            for q, b in zip(quantized, out, strict=True)
        ]

    carry = [a if is_implicit(a) else jnp.asarray(a) for a in carry]
    return carry, agree


@control_rule_for("scan")
def _scan(interpreter: Interpreter, eqn, args):
    params = eqn.params
    fn = interpreter.function(params["jaxpr"])
    consts, carry, xs = split_scan(params, args)
    n = len(carry)
    first = jax.tree.map(lambda a: jax.typeof(a).update(shape=a.shape[1:]), xs)

    def carried(carry):
        return fn(*consts, *carry, *jax.tree.map(jnp.zeros_like, first))[:n]

    carry, agree = _settle(interpreter, eqn, carried, carry)

    def body(carry, xs):
        out = fn(*consts, *carry, *xs)
        return agree(out[:n]), out[n:]

    carry, ys = lax.scan(
        body,
        carry,
        xs,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


@control_rule_for("while")
def _while(interpreter: Interpreter, eqn, args):
    params = eqn.params
    condition = interpreter.function(params["cond_jaxpr"])
    step = interpreter.function(params["body_jaxpr"])
    n, m = params["cond_nconsts"], params["body_nconsts"]
    condition_consts, step_consts, carry = args[:n], args[n : n + m], args[n + m :]

    def body(carry):
        return step(*step_consts, *carry)

    carry, agree = _settle(interpreter, eqn, body, carry)
    return lax.while_loop(
        lambda carry: condition(*condition_consts, *carry)[0],
        lambda carry: agree(body(carry)),
        carry,
    )


@control_rule_for("cond")
def _cond(interpreter: Interpreter, eqn, args):
    index, *operands = args
    if is_implicit(index):
        index = interpreter.dense(eqn, index)
    branches = [interpreter.function(branch) for branch in eqn.params["branches"]]
    outs = [jax.eval_shape(branch, *operands) for branch in branches]
    keep = [
        all(is_implicit(out) and _is_like(column[0], out) for out in column)
        for column in zip(*outs, strict=True)
    ]

    def agreeing(branch):
        def fn(*operands):
            return [
                out if same else interpreter.dense(eqn, out)
                for same, out in zip(keep, branch(*operands), strict=True)
            ]

        return fn

    return lax.switch(index, [agreeing(branch) for branch in branches], *operands)
