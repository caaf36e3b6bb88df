"""The arithmetic that has computed a value inside of `jax.jit`."""

from collections.abc import Callable
from typing import Any

from ._compat import equation_of, Literal, open_jaxpr


_ARITHMETIC = {"add", "sub", "mul", "div", "rem", "pow", "integer_pow", "square", "neg"}
_ARITHMETIC |= {"round", "floor", "ceil", "reduce_sum", "dot_general", "add_any"}
# Operands that contain values, and not indices or conditions.
_MOVES = {"select_n": slice(1, None), "gather": slice(1), "dynamic_slice": slice(1)}
_MOVES |= dict.fromkeys(["reshape", "squeeze", "transpose", "rev", "slice"], slice(1))
_MOVES |= dict.fromkeys(["convert_element_type", "broadcast_in_dim"], slice(1))
_MOVES |= dict.fromkeys(["copy", "clamp", "max", "min", "concatenate"], slice(None))


def arithmetic_of(x: Any, inputs: list) -> str | None:
    """Return the name of an arithmetic primitive that has computed a tracer of `jit`
    from `inputs`. Return None if there is none, or if it is unknown.

    Operations that move or choose values are followed to their operands.
    """
    is_input = {id(leaf) for leaf in inputs}
    return _arithmetic(x, lambda x: None if id(x) in is_input else equation_of(x))[0]


def _arithmetic(x: Any, equation_of: Callable) -> tuple[str | None, list]:
    """Return the name of the arithmetic behind a value, and values without equation
    that it consists of."""
    pending, seen, ends = [x], set(), []
    while pending:
        x = pending.pop()
        if id(x) in seen or isinstance(x, Literal):
            continue
        seen.add(id(x))
        eqn = equation_of(x)
        name = getattr(getattr(eqn, "primitive", None), "name", None)
        if name is None:
            ends.append(x)
        elif name in _ARITHMETIC:
            return name, []
        elif name in ("jit", "pjit"):
            jaxpr, _ = open_jaxpr(eqn.params["jaxpr"])
            made = {var: inner for inner in jaxpr.eqns for var in inner.outvars}
            out = jaxpr.outvars[list(eqn.outvars).index(getattr(x, "val", x))]
            name, found = _arithmetic(out, made.get)
            if name is not None:
                return name, []
            of = dict(zip(jaxpr.invars, eqn.invars, strict=True))
            pending += [of[var] for var in found if var in of]
        else:
            pending += list(eqn.invars)[_MOVES.get(name, slice(0))]
    return None, ends
