"""`custom_jvp`, `custom_vjp`, `custom_vmap`: the user's rule is kept, and interpreted.

The rule sees a plain array in place of an implicit one.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ..._jax import custom_jvp_rule, custom_vjp_rules
from ...arrays import is_implicit
from .._interpreter import Interpreter
from ..rules import control_rule_for


@control_rule_for("custom_jvp_call")
def _custom_jvp_call(interpreter: Interpreter, eqn, args):
    rule = custom_jvp_rule(eqn)
    fn = jax.custom_jvp(interpreter.function(eqn.params["call_jaxpr"]))

    def jvp(primals, tangents):
        def plain(primal, tangent):
            if is_implicit(primal):
                if all(isinstance(t, SymbolicZero) for t in _floating(tangent)):
                    return jnp.zeros(primal.shape, primal.dtype)
                decode = lambda q: interpreter.dense(eqn, q)
                tangent = jax.tree.map(_instantiate, primal, tangent)
                return jax.jvp(decode, (primal,), (tangent,))[1]
            if isinstance(tangent, SymbolicZero):
                return jnp.zeros_like(primal)
            return tangent

        tangents = [plain(p, t) for p, t in zip(primals, tangents, strict=True)]
        return interpreter.call(rule, list(primals), tangents)

    fn.defjvp(jvp, symbolic_zeros=True)
    return fn(*args)


def _floating(tangent) -> list:
    leaves = jax.tree.leaves(tangent, is_leaf=lambda x: isinstance(x, SymbolicZero))
    return [t for t in leaves if t.dtype != jax.dtypes.float0]


def _instantiate(primal, tangent):
    if not isinstance(tangent, SymbolicZero):
        return tangent
    zero: Any = tangent
    return np.zeros(zero.shape, zero.dtype)


@control_rule_for("custom_vjp_call")
def _custom_vjp_call(interpreter: Interpreter, eqn, args):
    body = interpreter.function(eqn.params["call_jaxpr"])
    plain = [not is_implicit(x) for x in args]
    forward, backward = custom_vjp_rules(eqn, plain)
    fn = jax.custom_vjp(lambda *args: body(*args))

    def fwd(*args):
        return interpreter.call(forward, *args)

    def bwd(residuals, cotangents):
        out = interpreter.call(backward, residuals, list(cotangents))
        # A quantized array has no cotangent.
        return tuple(c if p else None for c, p in zip(out, plain, strict=True))

    fn.defvjp(fwd, bwd)
    return fn(*args)


@control_rule_for("custom_vmap_call")
def _custom_vmap_call(interpreter: Interpreter, eqn, args):
    params = eqn.params
    fn = jax.custom_batching.custom_vmap(
        lambda *args: interpreter.function(params["call"])(*args)
    )

    @fn.def_vmap
    def _(axis_size, in_batched, *args):
        batched = [any(jax.tree.leaves(b)) for b in in_batched]

        def rule(*args):
            tree = params["in_tree"]
            out, out_batched = params["rule"](
                axis_size, jax.tree.unflatten(tree, batched), *tree.unflatten(args)
            )
            flags.extend(jax.tree.leaves(out_batched))
            return jax.tree.leaves(out)

        flags: list = []
        out = interpreter.call(rule, *args)
        return out, flags[: len(out)]

    return fn(*args)
