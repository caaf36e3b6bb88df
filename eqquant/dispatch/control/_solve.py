"""The rule of `custom_linear_solve`, the primitive of `cg`, `gmres` and others."""

from jax import lax

from .._interpreter import Interpreter
from ..rules import control_rule_for


@control_rule_for("custom_linear_solve")
def _custom_linear_solve(interpreter: Interpreter, eqn, args):
    jaxprs = eqn.params["jaxprs"]
    args, consts = list(args), []
    for length in eqn.params["const_lengths"]:
        consts.append(args[:length])
        args = args[length:]
    b = [interpreter.dense(eqn, x) for x in args]
    has_aux = len(eqn.outvars) > len(b)

    def call(jaxpr, consts, x):
        return interpreter.function(jaxpr)(*consts, *x)

    def solver(jaxpr, consts):
        def solve(_, b):
            out = call(jaxpr, consts, b)
            return (out[: len(b)], out[len(b) :]) if has_aux else out

        return solve

    matvec, _, solve, transpose_solve = consts
    transpose = jaxprs.transpose_solve
    out = lax.custom_linear_solve(
        lambda x: call(jaxprs.matvec, matvec, x),
        b,
        solver(jaxprs.solve, solve),
        transpose and solver(transpose, transpose_solve),
        symmetric=jaxprs.vecmat is jaxprs.matvec,
        has_aux=has_aux,
    )
    return [*out[0], *out[1]] if has_aux else out
