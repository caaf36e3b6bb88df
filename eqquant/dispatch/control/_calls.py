"""Calls: `jit` and `checkpoint`."""

import weakref

import jax

from ..._jax import called_jaxpr, is_traced
from ...arrays import exposed, restored
from .._interpreter import Interpreter
from ..rules import control_rule_for


# Compiled programs of jaxprs, because eager calls interpret the same jaxpr repeatedly.
_compiled: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@control_rule_for("jit", "pjit")
def _jit(interpreter: Interpreter, eqn, args):
    jaxpr = eqn.params["jaxpr"]
    compiled = _compiled.setdefault(jaxpr, {})
    # In a traced function, results may be views. The index is then a result as well.
    is_inner = any(map(is_traced, jax.tree.leaves(args)))
    if (interpreter, is_inner) not in compiled:
        # A reference to the jaxpr in its own entry would keep it alive forever.
        reference = weakref.ref(jaxpr)

        def call(*args):
            out = interpreter.function(reference())(*restored(args))
            return exposed(out) if is_inner else out

        call.__name__ = eqn.params["name"]
        jitted = jax.jit(call, inline=eqn.params["inline"])
        compiled[interpreter, is_inner] = jitted
    return restored(compiled[interpreter, is_inner](*exposed(args)))


# Since JAX 0.11, the derivative of a checkpointed function is an `eval_jaxpr`.
@control_rule_for("closed_call", "core_call", "eval_jaxpr")
def _call(interpreter: Interpreter, eqn, args):
    return interpreter.function(called_jaxpr(eqn.params))(*args)


@control_rule_for("remat2", "remat", "checkpoint")
def _remat(interpreter: Interpreter, eqn, args):
    inner = interpreter.function(eqn.params["jaxpr"])
    fn = lambda *args: inner(*restored(args))
    prevent_cse, policy = eqn.params["prevent_cse"], eqn.params["policy"]
    return jax.checkpoint(fn, prevent_cse=prevent_cse, policy=policy)(*exposed(args))
