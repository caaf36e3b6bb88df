"""Control flow: primitives that hold jaxprs.

Each is rebuilt with the public function that made it (`lax.scan`, `jax.checkpoint`,
...), around the interpreted jaxpr. Those functions take pytrees, and so quantized
arrays; no private parameter is ever put together here.
"""

import weakref
from collections.abc import Callable
from typing import Any, TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from . import _compat
from ._implicit import is_implicit
from ._materialise import materialise


if TYPE_CHECKING:
    from ._dispatch import Interpreter


_rules: dict[str, Callable] = {}


def control_rule(primitive: Any) -> Callable | None:
    """`rule(interpreter, eqn, args) -> results`."""
    return _rules.get(primitive.name)


def _rule(*names: str):
    def decorator(fn):
        for name in names:
            _rules[name] = fn
        return fn

    return decorator


#
# Calls
#

# An eager call interprets the same jaxpr again and again; what it was compiled to has
# to be found again.
_compiled: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@_rule("jit", "pjit")
def _jit(interpreter: "Interpreter", eqn, args):
    jaxpr = eqn.params["jaxpr"]
    by_interpreter = _compiled.setdefault(jaxpr, {})
    if interpreter not in by_interpreter:
        # A reference to the jaxpr in its own entry would keep it alive for ever.
        reference = weakref.ref(jaxpr)

        def call(*args):
            return interpreter.function(reference())(*args)

        call.__name__ = eqn.params["name"]
        by_interpreter[interpreter] = jax.jit(call, inline=eqn.params["inline"])
    return by_interpreter[interpreter](*args)


@_rule("closed_call", "core_call")
def _call(interpreter: "Interpreter", eqn, args):
    return interpreter.function(eqn.params["call_jaxpr"])(*args)


@_rule("remat2", "remat", "checkpoint")
def _remat(interpreter: "Interpreter", eqn, args):
    fn = interpreter.function(eqn.params["jaxpr"])
    prevent_cse, policy = eqn.params["prevent_cse"], eqn.params["policy"]
    return jax.checkpoint(fn, prevent_cse=prevent_cse, policy=policy)(*args)


#
# Loops and branches
#


def _dense(interpreter: "Interpreter", eqn, x):
    if not is_implicit(x):
        return x
    return materialise(x, interpreter.describe(eqn), interpreter.policy)


def _is_like(a, b) -> bool:
    """Whether a loop can carry `a` and get `b`: the same, or both plain."""
    if is_implicit(a) or is_implicit(b):
        return jax.tree.structure(a) == jax.tree.structure(b) and all(
            x.shape == y.shape and x.dtype == y.dtype
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        )
    return True


def _settle(interpreter: "Interpreter", eqn, body: Callable, carry: list):
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
            carry[i] = _dense(interpreter, eqn, carry[i])
    quantized = [is_implicit(a) for a in carry]

    def agree(out):
        return [
            b if q else _dense(interpreter, eqn, b)
            for q, b in zip(quantized, out, strict=True)
        ]

    carry = [a if is_implicit(a) else jnp.asarray(a) for a in carry]
    return carry, agree


@_rule("scan")
def _scan(interpreter: "Interpreter", eqn, args):
    params = eqn.params
    fn = interpreter.function(params["jaxpr"])
    consts, carry, xs = _compat.split_scan(params, args)
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


@_rule("while")
def _while(interpreter: "Interpreter", eqn, args):
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


@_rule("cond")
def _cond(interpreter: "Interpreter", eqn, args):
    index, *operands = args
    if is_implicit(index):
        index = _dense(interpreter, eqn, index)
    branches = [interpreter.function(branch) for branch in eqn.params["branches"]]
    outs = [jax.eval_shape(branch, *operands) for branch in branches]
    keep = [
        all(is_implicit(out) and _is_like(column[0], out) for out in column)
        for column in zip(*outs, strict=True)
    ]

    def agreeing(branch):
        def fn(*operands):
            return [
                out if same else _dense(interpreter, eqn, out)
                for same, out in zip(keep, branch(*operands), strict=True)
            ]

        return fn

    return lax.switch(index, [agreeing(branch) for branch in branches], *operands)


#
# Custom rules: those of the user are kept, and interpreted as well. What they see in
# place of a quantized array is an array.
#


@_rule("custom_jvp_call")
def _custom_jvp_call(interpreter: "Interpreter", eqn, args):
    rule = _compat.custom_jvp_rule(eqn)
    fn = jax.custom_jvp(interpreter.function(eqn.params["call_jaxpr"]))

    def jvp(primals, tangents):
        def plain(primal, tangent):
            if is_implicit(primal):
                if all(isinstance(t, SymbolicZero) for t in _floating(tangent)):
                    return jnp.zeros(primal.shape, primal.dtype)
                decode = lambda q: _dense(interpreter, eqn, q)
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


@_rule("custom_vjp_call")
def _custom_vjp_call(interpreter: "Interpreter", eqn, args):
    body = interpreter.function(eqn.params["call_jaxpr"])
    plain = [not is_implicit(x) for x in args]
    forward, backward = _compat.custom_vjp_rules(eqn, plain)
    fn = jax.custom_vjp(lambda *args: body(*args))

    def fwd(*args):
        return interpreter.call(forward, *args)

    def bwd(residuals, cotangents):
        out = interpreter.call(backward, residuals, list(cotangents))
        # A quantized array has no cotangent.
        return tuple(c if p else None for c, p in zip(out, plain, strict=True))

    fn.defvjp(fwd, bwd)
    return fn(*args)


@_rule("custom_vmap_call")
def _custom_vmap_call(interpreter: "Interpreter", eqn, args):
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


#
# Meshes
#


@_rule("shard_map")
def _shard_map(interpreter: "Interpreter", eqn, args):
    params = eqn.params
    mesh = params["mesh"]
    in_specs, operands = [], []
    for x, spec in zip(args, params["in_specs"], strict=True):
        if is_implicit(x):
            specs = x.split_specs(spec, mesh)
            if specs is NotImplemented:
                x = _dense(interpreter, eqn, x)
            else:
                spec = specs
        in_specs.append(spec)
        operands.append(x)
    fn = interpreter.function(params["jaxpr"])
    return jax.shard_map(
        lambda *args: [_dense(interpreter, eqn, x) for x in fn(*args)],
        mesh=mesh,
        in_specs=tuple(in_specs),
        out_specs=list(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=_compat.shard_map_manual_axes(params),
    )(*operands)
