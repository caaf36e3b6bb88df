"""Calls: `jit` and `checkpoint`."""

import weakref

import jax

from ..._jax import called_jaxpr
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
    return jax.checkpoint(fn, prevent_cse=prevent_cse, policy=policy)(*args)
