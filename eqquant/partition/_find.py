"""The plan of a product: from the types of its operands, or from its argument."""

from typing import Any

import jax
from jax.interpreters import mlir

from .._jax import explicit_mesh_of, has_explicit_axes, num_devices, spec_of, warn
from ._plan import Names, names_of, Plan
from ._rule import Partition


def plan_from_types(x, codes, scales=None, asked: Plan | None = None) -> Plan | None:
    """Return the plan on a mesh with explicit axes; None on other meshes.

    Types do not contain the requested sharding of the result: the plan argument of the
    product contains it.
    """
    mesh = explicit_mesh_of(codes) or explicit_mesh_of(x)
    if mesh is None:
        return None
    axes, batch = tuple(map(names_of, spec_of(codes))), names_of(spec_of(x)[-2])
    scatter: tuple[Names, Names] = ((), ())
    if asked is not None and asked.mesh == mesh:
        batch, scatter = asked.batch, asked.scatter
    left = () if scales is None else map(names_of, spec_of(scales))
    whole = scales is not None and not {n for names in left for n in names} & {*batch}
    return Plan(mesh, axes, batch, scatter, whole_scales=whole)


def plan_for(
    ctx: mlir.LoweringRuleContext, plan: Plan | None, x, codes, scales=None
) -> Plan | None:
    """Return the plan of a product during lowering. Warn if there is none."""
    explicit = plan_from_types(x, codes, scales, plan)
    if explicit is not None:
        return explicit
    # Both operands come from outside of the mesh: they are replicated.
    if has_explicit_axes():
        return Plan(jax.sharding.get_abstract_mesh(), ())
    devices = num_devices(ctx)
    if plan is not None and plan.mesh.size == devices:
        return plan
    warn(
        f"quantized_dot: a product is compiled for {devices} devices without a plan"
        f"{'' if plan is None else f' for this mesh (its plan is for {plan.mesh})'}. "
        "It gets no kernel, and every device may gather its weight. Shard the model by "
        "`eqquant.shard_tree(model, mesh, specs)`, use a mesh with explicit axes, or "
        "use `jax.shard_map`.",
        UserWarning,
        once=True,
    )
    return None


def result_type(x: Any, codes: Any, shape, dtype, partition: Partition | None) -> Any:
    """Return the type of the result of a product, with a sharding on a mesh with
    explicit axes."""
    kwargs: dict[str, Any] = {"shape": tuple(shape), "dtype": dtype}
    if partition is not None:
        split = x if explicit_mesh_of(x) else codes
        kwargs["sharding"] = split.sharding.update(spec=partition.out_spec)
    return x.update(weak_type=False, **kwargs)
