"""The interpreter of jaxprs on implicit arrays."""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .._jax import bind_equation, finish, is_stale, Literal, open_jaxpr, source_of
from ..arrays import (
    ImplicitArray,
    is_implicit,
    materialise,
    OnMaterialise,
    PassedArray,
)
from ._callables import remove_partners, substitute
from .rules import control_rule_of, Decoded, rules_of


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """An interpreter that evaluates jaxprs on implicit and plain arrays."""

    policy: OnMaterialise

    def call(self, fn: Callable, *args, **kwargs) -> Any:
        """Call `fn`, with implicit arrays in its arguments or closures."""
        everything = (fn, args, kwargs)
        found: list[ImplicitArray] = []

        def collect(q):
            found.append(q)
            # A different object, so that the containers of `q` count as changed.
            return jax.tree.leaves(q)[0]

        hollow: list[Any] = []
        substitute(everything, collect, lambda q: hollow.append(q) or q)
        if not found:
            return fn(*args, **kwargs)
        without_partner = remove_partners(found, hollow)

        leaves, treedef = jax.tree.flatten(everything, is_leaf=is_implicit)
        dynamic = [x for x in leaves if eqx.is_array(x)]
        out: dict[str, Any] = {}

        def flat(stand_ins, arrays):
            stand_in, array = iter(stand_ins), iter(arrays)
            filled = [next(array) if eqx.is_array(x) else x for x in leaves]
            fn, args, kwargs = substitute(
                jax.tree.unflatten(treedef, filled),
                lambda _: next(stand_in),
                without_partner,
            )
            results, out["treedef"] = jax.tree.flatten(fn(*args, **kwargs))
            finish([*stand_ins, *arrays])
            out["static"] = [None if _is_traced(x) else x for x in results]
            return [x for x in results if _is_traced(x)]

        jaxpr = jax.make_jaxpr(flat)([q.struct() for q in found], dynamic)
        results = map(self._returned, self.function(jaxpr)(*found, *dynamic))
        filled = [next(results) if x is None else x for x in out["static"]]
        return jax.tree.unflatten(out["treedef"], filled)

    def function(self, jaxpr) -> Callable[..., list]:
        """Return a function that evaluates a jaxpr."""
        return ft.partial(self.evaluate, jaxpr)

    def evaluate(self, jaxpr, *args) -> list:
        jaxpr, consts = open_jaxpr(jaxpr)
        if any(map(is_stale, consts)):
            raise ValueError(
                "quaxify: the derivative rule of a custom function closes over an "
                "array that `quaxify` traces. The rule runs later, so, as under "
                "`jax.jit`, the array must be an argument of the function. With "
                "diffrax's `BacksolveAdjoint` pass weights as `args`, not in a closure."
            )
        env = dict(zip(jaxpr.constvars, consts, strict=False))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(var):
            return var.val if isinstance(var, Literal) else env[var]

        for eqn in _used(jaxpr):
            values = [read(var) for var in eqn.invars]
            if any(isinstance(x, ImplicitArray) for x in values):
                # The context of the equation, because `auto_axes` changes it.
                with eqn.ctx.manager:
                    results = self.apply(eqn, values)
            else:
                results = bind_equation(eqn, values)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def apply(self, eqn, args: list) -> list:
        """Evaluate one equation with a quantized operand."""
        control = control_rule_of(eqn.primitive)
        if control is not None:
            return list(control(self, eqn, args))
        for rule in rules_of(eqn.primitive):
            result = rule(args, eqn.params)
            if isinstance(result, Decoded):
                result = result.then(self.dense(eqn, result.array))
            if result is not NotImplemented:
                multiple = eqn.primitive.multiple_results
                results = list(result) if multiple else [result]
                _check_results(eqn, results)
                return results
        return bind_equation(eqn, [self.dense(eqn, x) for x in args])

    def _returned(self, x: Any) -> Any:
        """Return a result that users can use."""
        is_passed = lambda x: isinstance(x, PassedArray)
        if any(map(is_passed, jax.tree.leaves(x, is_leaf=is_passed))):
            return materialise(x, "the result of `shard_map`", self.policy)
        return x

    def dense(self, eqn, x: Any) -> Any:
        """Return `x` as a plain array, if the policy allows decoding it."""
        if not is_implicit(x):
            return x
        what = f"`{eqn.primitive.name}` (at {source_of(eqn)})"
        return materialise(x, what, self.policy)


def _check_results(eqn, results: list) -> None:
    """Raise an error if a rule has returned something else than its primitive."""
    described = lambda x: (tuple(x.shape), x.dtype)
    expected = [described(var.aval) for var in eqn.outvars]
    is_array = lambda x: hasattr(x, "shape") and hasattr(x, "dtype")
    returned = [described(x) if is_array(x) else type(x) for x in results]
    if returned != expected:
        raise TypeError(
            f"quaxify: the rule of `{eqn.primitive.name}` has returned {returned}, but "
            f"must return {expected} (shape and dtype of each result), or "
            "NotImplemented."
        )


def _used(jaxpr) -> list:
    """Drop dead equations, so that they cannot raise."""
    variables = lambda atoms: [x for x in atoms if not isinstance(x, Literal)]
    needed, equations = set(variables(jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            equations.append(eqn)
            needed.update(variables(eqn.invars))
    return equations[::-1]


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.Array)
