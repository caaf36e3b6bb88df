"""The all-gather of quantized scales, before they are decoded to floats.

If a mesh axis splits both the tokens and a weight, a product gathers the weight. This
file gathers its 8-bit scales while they are still 8-bit.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from .._jax import (
    explicit_mesh_of,
    has_explicit_axes,
    is_automatically_partitioned,
    manual_axes_in_context,
    mapped_mesh_axes,
    num_devices,
    parts_of,
    spec_of,
    zero_tangent,
)
from ._plan import names_of, Plan


all_gather_scales_p = Primitive("all_gather_scales")


def all_gather_scales(scales, plan: Plan | None, x, stack: int):
    """Gather scales for a product with `x`. Return them, and the plan of the product.

    The first `stack` axes of `x` are the axes of a stack of weights.
    """
    gather = lambda part: all_gather_scales_p.bind(part, x, plan=plan, stack=stack)
    if has_explicit_axes():
        return jax.tree.map(gather, scales), plan
    if plan is None or not set(plan.batch) & {n for names in plan.axes for n in names}:
        return scales, plan
    return jax.tree.map(gather, scales), dataclasses.replace(plan, whole_scales=True)


def _same(part, x, **_):
    del x
    return part


all_gather_scales_p.def_impl(_same)


@all_gather_scales_p.def_abstract_eval
def _abstract_eval(part, x, *, plan: Plan | None, stack: int):
    spec = _explicit_spec(part, x, plan, stack)
    if spec is None:
        return part
    return part.update(sharding=part.sharding.update(spec=spec))


def _explicit_spec(part, x, plan: Plan | None, stack: int) -> PartitionSpec | None:
    """Return the spec of the gathered parts from the types of both operands, or
    None."""
    if explicit_mesh_of(part) is None or explicit_mesh_of(x) is None:
        return None
    rows = {n for entry in spec_of(x)[stack:-1] for n in names_of(entry)}
    if plan is not None and plan.mesh == explicit_mesh_of(part):
        rows = set(plan.batch)
    rows |= mapped_mesh_axes()
    left = lambda entry: tuple(n for n in names_of(entry) if n not in rows)
    return PartitionSpec(*(left(entry) or None for entry in spec_of(part)))


def _constrained(part, plan: Plan):
    def fitting(size, names):
        names = tuple(name for name in names if name not in plan.batch)
        return names if size % parts_of(plan.mesh, names) == 0 else None

    axes = zip(part.shape, plan.of(part.ndim), strict=True)
    spec = PartitionSpec(*(fitting(size, names) or None for size, names in axes))
    return lax.with_sharding_constraint(part, NamedSharding(plan.mesh, spec))


def _lower(ctx, part, x, *, plan: Plan | None, stack: int):
    fn = _same
    of_part, of_x = ctx.avals_in
    mesh: Any = explicit_mesh_of(of_part)
    spec = _explicit_spec(of_part, of_x, plan, stack)
    here = is_automatically_partitioned(ctx) and not manual_axes_in_context()
    if spec is not None:

        def fn(part, x):
            del x
            with jax.sharding.use_abstract_mesh(mesh):
                return jax.sharding.reshard(part, spec)

    elif plan is not None and here and num_devices(ctx) == plan.mesh.size:
        fn = lambda part, x: _constrained(part, plan)
    return mlir.lower_fun(fn, multiple_results=False)(ctx, part, x)


mlir.register_lowering(all_gather_scales_p, _lower)


def _jvp(primals, tangents, **params):
    out = all_gather_scales_p.bind(*primals, **params)
    (_, x), (tangent, _) = primals, tangents
    if type(tangent) is ad.Zero:
        return out, zero_tangent(out)
    return out, all_gather_scales_p.bind(tangent, x, **params)


def _transpose(ct, part, x, **_):
    if type(ct) is not ad.Zero and explicit_mesh_of(ct) is not None:
        ct = jax.sharding.reshard(ct, part.aval.sharding.spec)
    return ct, None


def _batch(args, dims, *, stack: int, plan: Plan | None):
    (part, x), (of_part, of_x) = args, dims
    if of_part is None:  # Additional rows of the activation.
        x = jnp.moveaxis(x, of_x, stack)
        if plan is not None and plan.mesh == explicit_mesh_of(x):
            batch = *names_of(spec_of(x)[stack]), *plan.batch
            plan = dataclasses.replace(plan, batch=batch)
        return all_gather_scales_p.bind(part, x, stack=stack, plan=plan), None
    part = jnp.moveaxis(part, of_part, 0)
    if of_x is not None:
        x, stack = jnp.moveaxis(x, of_x, 0), stack + 1
    return all_gather_scales_p.bind(part, x, stack=stack, plan=plan), 0


ad.primitive_jvps[all_gather_scales_p] = _jvp
ad.primitive_transposes[all_gather_scales_p] = _transpose
batching.primitive_batchers[all_gather_scales_p] = _batch
