"""Rules by primitive."""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.extend.core import Primitive
from jaxtyping import Array

from ..._jax import typed
from ...arrays import ImplicitArray, QuantizedArray


_rules: dict[str, list[Callable]] = {}


@typed
def register(*primitives: Primitive) -> Callable[[Callable], Callable]:
    """Say what a JAX primitive does when an operand is a quantized array.

    The rule is called with the operands (arrays, and at least one
    [`eqquant.QuantizedArray`][]; never a [`eqquant.arrays.LoraArray`][]) and the
    parameters of the primitive. It returns what
    the primitive returns: a value, or for a primitive with several results a list of
    them; plain or quantized. Or it returns `NotImplemented`, and the rule registered
    before it is tried; when there is none left the operands are dequantized, under the
    policy of [`eqquant.quaxify`][].

    !!! Example

        ```python
        import eqquant
        import jax
        import jax.numpy as jnp
        from jax import lax

        @eqquant.register(lax.abs_p)
        def _abs(q: eqquant.QuantizedArray):
            if q.format.name != "int8":
                return NotImplemented
            # Exact, and it stays quantized.
            return q.replace(codes=jnp.abs(q.codes), scales=jnp.abs(q.scales))

        q = eqquant.quantize(jax.random.normal(jax.random.key(0), (64, 64)), "int8")
        magnitudes = eqquant.quaxify(jnp.abs)(q)
        assert isinstance(magnitudes, eqquant.QuantizedArray)
        ```

    **Arguments:**

    - `*primitives`: one primitive or more, such as `jax.lax.dot_general_p`.

    **Returns:**

    A decorator, which returns the rule as it was.

    **Raises:**

    `TypeError` if an argument is not a primitive.
    """
    for primitive in primitives:
        if not isinstance(primitive, Primitive):
            raise TypeError(f"register: expected JAX primitives, got {primitive!r}.")

    def decorator(rule: Callable) -> Callable:
        @ft.wraps(rule)
        def guarded(*operands, **params):
            if all(isinstance(x, QuantizedArray) for x in operands if _is_implicit(x)):
                return rule(*operands, **params)
            return NotImplemented

        rule_for(*primitives)(guarded)
        return rule

    return decorator


def _is_implicit(x: Any) -> bool:
    return isinstance(x, ImplicitArray)


def rule_for(*primitives: Primitive) -> Callable[[Callable], Callable]:
    """As [`register`][], for a rule that serves any implicit array."""
    return register_names(*(primitive.name for primitive in primitives))


class Decoded(NamedTuple):
    """Returned by a rule that needs `array` decoded. If the policy allows it, the
    interpreter decodes the array and calls `then` with it."""

    array: ImplicitArray
    then: Callable[[Array], Any]


def register_names(*names: str) -> Callable[[Callable], Callable]:
    """As [`rule_for`][], by name: some primitives are not public."""

    def decorator(rule: Callable) -> Callable:
        for name in names:
            _rules.setdefault(name, []).append(rule)
        return rule

    return decorator


def rules_of(primitive: Any) -> list[Callable]:
    """The rules of a primitive, last registered first."""
    return _rules.get(primitive.name, [])[::-1]


#
# Control flow
#

_control_rules: dict[str, Callable] = {}


def control_rule_for(*names: str) -> Callable[[Callable], Callable]:
    """As [`register_names`][], for a primitive that holds jaxprs. The rule is
    `(interpreter, equation, operands) -> results`. Each primitive has at most one, and
    it goes before all others."""

    def decorator(rule: Callable) -> Callable:
        _control_rules.update(dict.fromkeys(names, rule))
        return rule

    return decorator


def control_rule_of(primitive: Any) -> Callable | None:
    return _control_rules.get(primitive.name)
