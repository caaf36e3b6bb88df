"""The registry of rules."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Primitive
from jaxtyping import Array

from ..._jax import typed
from ...arrays import ImplicitArray, QuantizedArray


_Rule = Callable[[Sequence[Any], dict[str, Any]], Any]
_rules: dict[str, list[_Rule]] = {}


@typed
def register(*primitives: Primitive) -> Callable[[Callable], Callable]:
    """Register a rule for a JAX primitive with a quantized operand.

    The rule is called with the operands (arrays, and at least one
    [`eqquant.QuantizedArray`][]; never a [`eqquant.arrays.LoraArray`][]), and with the
    parameters of the primitive that it names as keywords. It returns a plain or
    quantized value, or a list of values for a primitive with several results. If it
    returns `NotImplemented`, the rule that was registered before it is tried. Without
    another rule, the operands are dequantized, under the policy of
    [`eqquant.quaxify`][].

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
            # Exact, and the result is quantized.
            return q.replace(codes=jnp.abs(q.codes), scales=jnp.abs(q.scales))

        q = eqquant.quantize(jax.random.normal(jax.random.key(0), (64, 64)), "int8")
        magnitudes = eqquant.quaxify(jnp.abs)(q)
        assert isinstance(magnitudes, eqquant.QuantizedArray)
        ```

    **Arguments:**

    - `*primitives`: one primitive or more, such as `jax.lax.dot_general_p`.

    **Returns:**

    A decorator, which returns the unchanged rule.

    **Raises:**

    `TypeError` if an argument is not a primitive.
    """
    for primitive in primitives:
        if not isinstance(primitive, Primitive):
            raise TypeError(f"register: expected JAX primitives, got {primitive!r}.")

    def decorator(rule: Callable) -> Callable:
        called = _by_named_parameters(rule)

        def guarded(operands: Sequence[Any], parameters: dict[str, Any]):
            if all(isinstance(x, QuantizedArray) for x in operands if _is_implicit(x)):
                return called(operands, parameters)
            return NotImplemented

        for primitive in primitives:
            _rules.setdefault(primitive.name, []).append(guarded)
        return rule

    return decorator


def _is_implicit(x: Any) -> bool:
    return isinstance(x, ImplicitArray)


def rule_for(*primitives: Primitive) -> Callable[[Callable], Callable]:
    """Like [`register`][], for a rule that accepts every implicit array."""
    return register_names(*(primitive.name for primitive in primitives))


class Decoded(NamedTuple):
    """The result of a rule that needs `array` decoded.

    If the policy allows it, the interpreter decodes the array and calls `then` with it.
    """

    array: ImplicitArray
    then: Callable[[Array], Any]


def register_names(*names: str) -> Callable[[Callable], Callable]:
    """Like [`rule_for`][], by name, for primitives that are not public."""

    def decorator(rule: Callable) -> Callable:
        called = _by_named_parameters(rule)
        for name in names:
            _rules.setdefault(name, []).append(called)
        return rule

    return decorator


def _by_named_parameters(rule: Callable) -> _Rule:
    """Return a function of operands and parameters that passes those parameters of the
    primitive that the rule names, or all of them if it has `**kwargs`."""
    signature = inspect.signature(rule)
    declared = signature.parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in declared.values())

    def called(operands: Sequence[Any], parameters: dict[str, Any]):
        if not takes_all:
            parameters = {k: v for k, v in parameters.items() if k in declared}
        try:
            return rule(*operands, **parameters)
        except TypeError:
            _check_signature(rule, signature, operands, parameters)
            raise

    return called


def _check_signature(
    rule: Callable,
    signature: inspect.Signature,
    operands: Sequence[Any],
    parameters: dict[str, Any],
) -> None:
    try:
        signature.bind(*operands, **parameters)
    except TypeError as error:
        code = inspect.unwrap(rule).__code__
        raise TypeError(
            f"register: the rule {rule.__qualname__}{signature} at "
            f"{code.co_filename}:{code.co_firstlineno} must take the operands of its "
            f"primitive, which are {len(operands)} here: {error}. Keywords after them "
            "name parameters of the primitive."
        ) from None


def rules_of(primitive: Any) -> list[_Rule]:
    """Return the rules of a primitive, from the last registered one to the first."""
    return _rules.get(primitive.name, [])[::-1]


#
# Control flow
#

_control_rules: dict[str, Callable] = {}


def control_rule_for(*names: str) -> Callable[[Callable], Callable]:
    """Like [`register_names`][], for a primitive with inner jaxprs.

    The rule is `(interpreter, equation, operands) -> results`. Each primitive has at
    most one such rule, which precedes all others.
    """

    def decorator(rule: Callable) -> Callable:
        _control_rules.update(dict.fromkeys(names, rule))
        return rule

    return decorator


def control_rule_of(primitive: Any) -> Callable | None:
    return _control_rules.get(primitive.name)
