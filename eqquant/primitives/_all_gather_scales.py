"""Parts of scales in few bits, gathered before they are decoded to floats.

A weight that is split over the devices that have other rows of the activation is
gathered for a product. With scales of 8 bits this is where they are still in 8 bits.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from .._jax import (
    is_automatically_partitioned,
    manual_axes_in_context,
    num_devices,
    parts_of,
)
from ._plan import Plan


all_gather_scales_p = Primitive("all_gather_scales")


def all_gather_scales(scales, plan: Plan | None):
    """The same scales, and the plan of a product with them: their parts are gathered
    already."""
    if plan is None or not set(plan.batch) & {n for names in plan.axes for n in names}:
        return scales, plan
    scales = jax.tree.map(
        lambda part: all_gather_scales_p.bind(part, plan=plan), scales
    )
    return scales, dataclasses.replace(plan, whole_scales=True)


def _same(part, *, plan: Plan):
    del plan
    return part


all_gather_scales_p.def_impl(_same)
all_gather_scales_p.def_abstract_eval(_same)


def _constrained(part, *, plan: Plan):
    def fitting(size, names):
        names = tuple(name for name in names if name not in plan.batch)
        return names if size % parts_of(plan.mesh, names) == 0 else None

    axes = zip(part.shape, plan.of(part.ndim), strict=True)
    spec = PartitionSpec(*(fitting(size, names) or None for size, names in axes))
    return lax.with_sharding_constraint(part, NamedSharding(plan.mesh, spec))


def _lower(ctx, part, *, plan: Plan):
    here = is_automatically_partitioned(ctx) and num_devices(ctx) == plan.mesh.size
    gathers = here and not manual_axes_in_context()
    fn = _constrained if gathers else _same
    return mlir.lower_fun(fn, multiple_results=False)(ctx, part, plan=plan)


mlir.register_lowering(all_gather_scales_p, _lower)


def _batch(args, dims, *, plan: Plan):
    (part,), (dim,) = args, dims
    return all_gather_scales_p.bind(jnp.moveaxis(part, dim, 0), plan=plan), 0


batching.primitive_batchers[all_gather_scales_p] = _batch
