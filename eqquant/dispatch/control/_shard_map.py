"""The rule of `shard_map`."""

import jax

from ..._jax import shard_map_manual_axes
from ...arrays import Boundary, is_implicit
from .._interpreter import Interpreter
from ..rules import control_rule_for


@control_rule_for("shard_map")
def _shard_map(interpreter: Interpreter, eqn, args):
    params = eqn.params
    call = dict(
        mesh=params["mesh"],
        check_vma=params["check_vma"],
        axis_names=shard_map_manual_axes(params),
    )
    boundary = Boundary(**call)
    in_specs, operands = list(params["in_specs"]), list(args)
    for i, x in enumerate(args):
        if is_implicit(x):
            parts = boundary.split(x, in_specs[i])
            if parts is NotImplemented:
                operands[i] = interpreter.dense(eqn, x)
            else:
                operands[i], in_specs[i] = parts
    fn = interpreter.function(params["jaxpr"])
    out_specs, outside = list(params["out_specs"]), {}

    def local(*args):
        results = fn(*map(boundary.local, args))
        for i, x in enumerate(results):
            if is_implicit(x):
                parts = boundary.leave(x, params["out_specs"][i])
                if parts is NotImplemented:
                    results[i] = interpreter.dense(eqn, x)
                else:
                    # `jax.shard_map` reads `out_specs` after it has called this.
                    results[i], out_specs[i], outside[i] = parts
        return results

    shard_map = jax.shard_map(
        local, in_specs=tuple(in_specs), out_specs=out_specs, **call
    )
    results = shard_map(*operands)
    for i, restore in outside.items():
        results[i] = restore(results[i])
    return results
