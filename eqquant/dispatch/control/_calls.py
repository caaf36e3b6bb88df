"""Calls: `jit` and `checkpoint`."""

import weakref
from collections.abc import Callable

import jax
from jax import lax

from ..._jax import called_jaxpr
from ...primitives import quantized_dot_p
from .._interpreter import Interpreter
from ..rules import control_rule_for


# Compiled programs of jaxprs, because eager calls interpret the same jaxpr repeatedly.
_compiled: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@control_rule_for("jit", "pjit")
def _jit(interpreter: Interpreter, eqn, args):
    jaxpr = eqn.params["jaxpr"]
    by_interpreter = _compiled.setdefault(jaxpr, {})
    if interpreter not in by_interpreter:
        # A reference to the jaxpr in its own entry would keep it alive forever.
        reference = weakref.ref(jaxpr)

        def call(*args):
            return interpreter.function(reference())(*args)

        call.__name__ = eqn.params["name"]
        by_interpreter[interpreter] = jax.jit(call, inline=eqn.params["inline"])
    return by_interpreter[interpreter](*args)


# Since JAX 0.11, the derivative of a checkpointed function is an `eval_jaxpr`.
@control_rule_for("closed_call", "core_call", "eval_jaxpr")
def _call(interpreter: Interpreter, eqn, args):
    return interpreter.function(called_jaxpr(eqn.params))(*args)


@control_rule_for("remat2", "remat", "checkpoint")
def _remat(interpreter: Interpreter, eqn, args):
    fn = interpreter.function(eqn.params["jaxpr"])
    prevent_cse, policy = eqn.params["prevent_cse"], eqn.params["policy"]
    policy = None if policy is None else _with_products(policy)
    return jax.checkpoint(fn, prevent_cse=prevent_cse, policy=policy)(*args)


def _with_products(policy: Callable) -> Callable:
    """Return a policy that treats a quantized product like a dense product."""

    def saves(primitive, *avals, **params):
        if primitive is not quantized_dot_p:
            return policy(primitive, *avals, **params)
        x, codes, _ = avals
        batch = tuple(range(codes.ndim - 2))
        over = (x.ndim - 1,), (x.ndim - 1 - params["matmul"].contract_rows,)
        return policy(
            lax.dot_general_p,
            x,
            codes,
            dimension_numbers=(over, (batch, batch)),
            precision=None,
            preferred_element_type=None,
            out_sharding=None,
        )

    return saves
