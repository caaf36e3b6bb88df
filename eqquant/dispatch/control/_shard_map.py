"""The rule of `shard_map`."""

import jax

from ..._jax import shard_map_manual_axes
from ...arrays import is_implicit
from .._interpreter import Interpreter
from ..rules import control_rule_for


@control_rule_for("shard_map")
def _shard_map(interpreter: Interpreter, eqn, args):
    params = eqn.params
    mesh = params["mesh"]
    in_specs, operands = [], []
    for x, spec in zip(args, params["in_specs"], strict=True):
        if is_implicit(x):
            specs = x.split_specs(spec, mesh)
            if specs is NotImplemented:
                x = interpreter.dense(eqn, x)
            else:
                spec = specs
        in_specs.append(spec)
        operands.append(x)
    fn = interpreter.function(params["jaxpr"])
    out_specs = list(params["out_specs"])

    def local(*args):
        results = fn(*args)
        for i, x in enumerate(results):
            if is_implicit(x):
                specs = x.join_specs(params["out_specs"][i], mesh)
                if specs is NotImplemented:
                    results[i] = interpreter.dense(eqn, x)
                else:
                    # `jax.shard_map` reads `out_specs` after it has called this.
                    out_specs[i] = specs
        return results

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        check_vma=params["check_vma"],
        axis_names=shard_map_manual_axes(params),
    )(*operands)
