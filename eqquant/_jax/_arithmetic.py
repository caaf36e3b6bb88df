"""The arithmetic that has computed a value inside of `jax.jit`."""

from collections.abc import Callable, Sequence
from typing import Any

from ._compat import equation_of, Literal, open_jaxpr, split_scan, subjaxprs


_ARITHMETIC = {"add", "sub", "mul", "div", "rem", "pow", "integer_pow", "square", "neg"}
_ARITHMETIC |= {"round", "floor", "ceil", "reduce_sum", "dot_general", "add_any"}
_ARITHMETIC |= {"cumsum", "scatter-add", "scatter-sub", "scatter-mul", "psum"}
_ARITHMETIC |= {"psum_invariant", "and", "or", "xor", "not"}
# Operands that contain values, and not indices or conditions.
_MOVES = {"select_n": slice(1, None), "gather": slice(1), "dynamic_slice": slice(1)}
_MOVES |= dict.fromkeys(["reshape", "squeeze", "transpose", "rev", "slice"], slice(1))
_MOVES |= dict.fromkeys(["convert_element_type", "broadcast_in_dim"], slice(1))
_MOVES |= dict.fromkeys(["bitcast_convert_type", "reduce_precision"], slice(1))
_MOVES["stop_gradient"] = slice(1)
_MOVES |= dict.fromkeys(["copy", "clamp", "max", "min", "concatenate"], slice(None))
_MOVES |= {"pad": slice(2), "dynamic_update_slice": slice(2), "scatter": slice(0, 3, 2)}


def arithmetic_of(x: Any, inputs: list) -> str | None:
    """Return the name of an arithmetic primitive that has computed a tracer of `jit`
    from `inputs`. Return None if there is none, or if it is unknown.

    Operations that move or choose values are followed to their operands, as are the
    branches of `lax.cond` and the bodies of loops and calls.
    """
    is_input = {id(leaf) for leaf in inputs}
    return _arithmetic([x], lambda x: None if id(x) in is_input else equation_of(x))[0]


def _arithmetic(values: list, equation_of: Callable) -> tuple[str | None, list]:
    """Return the name of the arithmetic behind values, and the values without equation
    that they consist of."""
    pending, seen, ends = [*values], set(), []
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
        elif name in _MOVES:
            pending += list(eqn.invars)[_MOVES[name]]
        else:
            place = list(eqn.outvars).index(getattr(x, "val", x))
            if name in ("sort", "optimization_barrier"):
                pending.append(eqn.invars[place])
            for body in subjaxprs(eqn.params):
                name, found = _arithmetic_inside(eqn, body, place)
                if name is not None:
                    return name, []
                pending += found
    return None, ends


def _arithmetic_inside(eqn: Any, body: Any, place: int) -> tuple[str | None, list]:
    """As `_arithmetic`, for the result `place` of an equation that evaluates `body`: a
    call, a loop, or a branch of a condition."""
    jaxpr, _ = open_jaxpr(body)
    if body is eqn.params.get("cond_jaxpr"):
        return None, []
    made = {var: inner for inner in jaxpr.eqns for var in inner.outvars}
    positions = {var: i for i, var in enumerate(jaxpr.invars)}
    carried = _carried(eqn, len(positions))
    places, new, ends = set(), {place}, []
    while new:
        places |= new
        name, found = _arithmetic([jaxpr.outvars[i] for i in places], made.get)
        if name is not None:
            return name, []
        ends = [positions[var] for var in found if var in positions]
        # Each iteration of a loop reads results of the last one.
        new = {carried.index(i) for i in ends if i in carried} - places
    # The first operands of `cond` and `while` are not operands of the body.
    operands = list(eqn.invars)[len(eqn.invars) - len(positions) :]
    return None, [operands[i] for i in ends]


def _carried(eqn: Any, count: int) -> Sequence[int]:
    """Return which of the `count` operands of the body of a loop are carried."""
    if eqn.primitive.name == "while":
        return range(eqn.params["body_nconsts"], count)
    is_scan = eqn.primitive.name == "scan"
    return split_scan(eqn.params, list(range(count)))[1] if is_scan else ()
