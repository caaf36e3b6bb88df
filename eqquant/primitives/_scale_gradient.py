"""The gradient of a product with respect to the scales of its weight, as a primitive:
so that its lowering can split it over a mesh, as that of the product is.

It is linear in both factors, and its transposes are products with the weight whose
scales are the cotangent.
"""

import functools as ft
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._jax import (
    config,
    is_automatically_partitioned,
    match_varying,
    parts_of,
    zero_tangent,
)
from ..kernels import xla
from ._plan import Plan
from ._sharded import (
    gather,
    layout_of,
    on_shards,
    plan_for,
    plan_from_types,
    sharding_of_result,
)


scale_gradient_p = Primitive("quantized_scale_gradient")


def scale_gradient(over_rows, over_columns, codes, **params):
    """That of `sum(over_rows * (over_columns @ w.T))`: `(*batch, rows, blocks)`."""
    args = match_varying(over_rows, over_columns, codes)
    return scale_gradient_p.bind(*args, **params)


def _on_one(over_rows, over_columns, codes, *, plan=None, **params):
    del plan
    return xla.scale_gradient(over_rows, over_columns, codes, **params)


@ft.cache
def _compiled(**params):
    return jax.jit(ft.partial(scale_gradient_p.bind, **params))


@scale_gradient_p.def_impl
def _impl(*args, **params):
    if config("jax_disable_jit"):  # Then `jit(bind)` would come back here.
        return _on_one(*args, **params)
    return _compiled(**params)(*args)


@scale_gradient_p.def_abstract_eval
def _abstract_eval(over_rows, over_columns, codes, *, blocks, format, dtype, plan):
    shape = *codes.shape[:-1], blocks
    how: dict[str, Any] = {}
    plan = plan_from_types(over_columns, codes, asked=plan)
    if plan is not None:
        scales = jax.ShapeDtypeStruct(shape, dtype)
        spec = layout_of(plan, over_columns, codes, scales, format).of_weight(blocks)
        how["sharding"] = sharding_of_result(over_columns, codes, spec)
    return over_rows.update(shape=shape, dtype=dtype, weak_type=False, **how)


def _sharded(plan: Plan):
    def call(over_rows, over_columns, codes, *, blocks, format, dtype):
        scales = jax.ShapeDtypeStruct((*codes.shape[:-1], blocks), dtype)
        layout = layout_of(plan, over_columns, codes, scales, format)
        columns = layout.kept(layout.columns)
        per_row = 1 if blocks == 1 else blocks // parts_of(plan.mesh, columns)
        wide = jnp.promote_types(dtype, jnp.float32)

        def local(over_rows, over_columns, codes):
            codes = gather(layout, codes)
            out = _on_one(
                over_rows,
                over_columns,
                codes,
                blocks=per_row,
                format=format,
                dtype=wide,
            )
            left = list(layout.batch)
            if blocks == 1:
                left += columns
            # Each device keeps the part of its own scales.
            for axis, names in ((-2, layout.rows), (-1, layout.columns)):
                names = layout.gathers(names)
                if names and out.shape[axis] > 1:
                    axis = out.ndim + axis
                    out = lax.psum_scatter(
                        out, names, scatter_dimension=axis, tiled=True
                    )
                    left = [name for name in left if name not in names]
            out = lax.psum(out, tuple(left)) if left else out
            return out.astype(dtype)

        in_specs = (
            layout.of_factor(layout.rows),
            layout.of_factor(layout.columns),
            layout.of_weight(),
        )
        out_spec = layout.of_weight(blocks)
        return on_shards(local, plan, in_specs, out_spec)(
            over_rows, over_columns, codes
        )

    return call


def _lower(ctx, *args, plan, **params):
    fn = _on_one
    if is_automatically_partitioned(ctx):
        _, over_columns, codes = ctx.avals_in
        plan = plan_for(ctx, plan, over_columns, codes)
        fn = fn if plan is None else _sharded(plan)
    return mlir.lower_fun(fn, multiple_results=False)(ctx, *args, **params)


mlir.register_lowering(scale_gradient_p, _lower)


def _jvp(primals, tangents, **params):
    out = scale_gradient(*primals, **params)
    (rows, columns, codes), (rows_dot, columns_dot, _) = primals, tangents
    terms = []
    if type(rows_dot) is not ad.Zero:
        terms.append(scale_gradient(rows_dot, columns, codes, **params))
    if type(columns_dot) is not ad.Zero:
        terms.append(scale_gradient(rows, columns_dot, codes, **params))
    return out, ft.reduce(operator.add, terms) if terms else zero_tangent(out)


def _batch(args, dims, *, plan, **params):
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    if dims[2] is None:  # Each has scales of its own, but not codes.
        return jax.vmap(ft.partial(_on_one, **params), dims)(*args), 0

    def to_front(a, dim):
        if dim is None:
            return jnp.broadcast_to(a, (size, *a.shape))
        return jnp.moveaxis(a, dim, 0)

    args = map(to_front, args, dims)
    return scale_gradient(*args, plan=plan, **params), 0


ad.primitive_jvps[scale_gradient_p] = _jvp
batching.primitive_batchers[scale_gradient_p] = _batch
