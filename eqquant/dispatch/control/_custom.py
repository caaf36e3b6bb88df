"""`custom_jvp`, `custom_vjp` and `custom_vmap`: the user's rule is kept and
interpreted.

A rule receives a plain array in place of an implicit array, and the same information
about differentiated arguments as usual, because some rules depend on it.
"""

from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ..._jax import custom_jvp_rule, custom_vjp_rules, source_of, zero_of
from ...arrays import ImplicitArray, is_implicit
from .._interpreter import Interpreter
from ..rules import control_rule_for


@control_rule_for("custom_jvp_call")
def _custom_jvp_call(interpreter: Interpreter, eqn, args):
    rule = custom_jvp_rule(eqn)
    fn = jax.custom_jvp(interpreter.function(eqn.params["call_jaxpr"]))
    decode = lambda q: interpreter.dense(eqn, q)

    def as_plain(var, primal, tangent):
        if not is_implicit(primal):
            return tangent
        if _is_zero(tangent):
            return zero_of(var)
        tangent = jax.tree.map(_instantiate, primal, tangent)
        return jax.jvp(decode, (primal,), (tangent,))[1]

    def as_result(primal, tangent):
        if not is_implicit(primal):
            return primal, decode(tangent)
        if isinstance(tangent, SymbolicZero):
            return primal, jax.tree.map(SymbolicZero.from_primal_value, primal)
        return decode(primal), decode(tangent)

    def jvp(primals, tangents):
        tangents = map(as_plain, eqn.invars, primals, tangents)
        out = interpreter.call(rule, list(primals), list(tangents))
        pairs = [as_result(*pair) for pair in zip(*out, strict=True)]
        return [primal for primal, _ in pairs], [tangent for _, tangent in pairs]

    fn.defjvp(jvp, symbolic_zeros=True)
    return fn(*args)


def _is_zero(tangent) -> bool:
    """Return whether the tangent of every part of an implicit array is zero or
    integer."""
    leaves = jax.tree.leaves(tangent)
    return all(
        isinstance(t, SymbolicZero) or t.dtype == jax.dtypes.float0 for t in leaves
    )


def _instantiate(primal, tangent):
    if not isinstance(tangent, SymbolicZero):
        return tangent
    zero: Any = tangent
    return np.zeros(zero.shape, zero.dtype)


@control_rule_for("custom_vjp_call")
def _custom_vjp_call(interpreter: Interpreter, eqn, args):
    body = interpreter.function(eqn.params["call_jaxpr"])
    forward, backward = custom_vjp_rules(eqn)
    fn = jax.custom_vjp(lambda *args: body(*args))
    decode = lambda q: interpreter.dense(eqn, q)

    def fwd(*args):
        perturbed = [any(leaf.perturbed for leaf in jax.tree.leaves(x)) for x in args]
        args = jax.tree.map(lambda leaf: leaf.value, args)
        out, residuals = interpreter.call(forward, perturbed, *args)
        both = zip(args, perturbed, strict=True)
        weights = [x if p and is_implicit(x) else None for x, p in both]
        return out, (residuals, weights)

    def as_plain(var, cotangent):
        if not isinstance(cotangent, ImplicitArray):
            return cotangent
        if _is_zero(cotangent):
            return zero_of(var)
        raise NotImplementedError(
            f"{eqn.primitive.name} (at {source_of(eqn)}) returns a quantized array "
            "through which a gradient flows, and its backward rule takes only the "
            "gradient of the array in full. Dequantize the array before the function "
            "returns it, or apply `jax.lax.stop_gradient` to the result."
        )

    def as_parts(weight, cotangent):
        if weight is None or cotangent is None:
            return cotangent
        return jax.vjp(decode, weight)[1](cotangent)[0]

    def bwd(residuals, cotangents):
        residuals, weights = residuals
        cotangents = list(map(as_plain, eqn.outvars, cotangents))
        out = map(decode, interpreter.call(backward, residuals, cotangents))
        quantized = [is_implicit(x) for x in args]
        return tuple(
            None if q and weight is None else as_parts(weight, c)
            for q, weight, c in zip(quantized, weights, out, strict=True)
        )

    fn.defvjp(fwd, bwd, symbolic_zeros=True)
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
