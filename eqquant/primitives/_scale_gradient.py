"""The gradient of a product with respect to the scales of its weight.

It is a primitive, so that its lowering can split it over a mesh like the product. It is
linear in both factors, and its transposes are products with a weight whose scales are
the cotangent.
"""

import dataclasses
import functools as ft
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._jax import (
    define_impl,
    is_automatically_partitioned,
    match_varying,
    parts_of,
    zero_tangent,
)
from ..formats import Format
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


@dataclasses.dataclass(frozen=True)
class ScaleGradient:
    """The static parameters: the format of the weight, and its scales per row and their
    dtype."""

    format: Format
    blocks: int
    dtype: np.dtype

    def scales(self, codes) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*codes.shape[:-1], self.blocks), self.dtype)

    def __call__(self, over_rows, over_columns, codes):
        return xla.scale_gradient(
            over_rows,
            over_columns,
            codes,
            self.blocks,
            format=self.format,
            dtype=self.dtype,
        )


def scale_gradient(
    over_rows, over_columns, codes, gradient: ScaleGradient, plan: Plan | None
):
    """The gradient of `sum(over_rows * (over_columns @ w.T))` for the scales of `w`, of
    shape `(*batch, rows, blocks)`."""
    args = match_varying(over_rows, over_columns, codes)
    return scale_gradient_p.bind(*args, gradient=gradient, plan=plan)


def _uncompiled(*args, gradient: ScaleGradient, plan: Plan | None):
    del plan
    return gradient(*args)


define_impl(scale_gradient_p, _uncompiled)


@scale_gradient_p.def_abstract_eval
def _abstract_eval(
    over_rows, over_columns, codes, *, gradient: ScaleGradient, plan: Plan | None
):
    scales = gradient.scales(codes)
    kwargs: dict[str, Any] = {}
    plan = plan_from_types(over_columns, codes, asked=plan)
    if plan is not None:
        layout = layout_of(plan, over_columns, codes, scales, gradient.format)
        spec = layout.of_weight(gradient.blocks)
        kwargs["sharding"] = sharding_of_result(over_columns, codes, spec)
    return over_rows.update(
        shape=scales.shape, dtype=scales.dtype, weak_type=False, **kwargs
    )


def _sharded(gradient: ScaleGradient, plan: Plan):
    dtype, blocks = gradient.dtype, gradient.blocks

    def call(over_rows, over_columns, codes):
        scales = gradient.scales(codes)
        layout = layout_of(plan, over_columns, codes, scales, gradient.format)
        columns = layout.kept(layout.columns)
        per_row = 1 if blocks == 1 else blocks // parts_of(plan.mesh, columns)
        part = dataclasses.replace(
            gradient, blocks=per_row, dtype=jnp.promote_types(dtype, jnp.float32)
        )

        def local(over_rows, over_columns, codes):
            codes = gather(layout, codes)
            out = part(over_rows, over_columns, codes)
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


def _lower(ctx, *args, gradient: ScaleGradient, plan: Plan | None):
    fn: Callable = gradient
    if is_automatically_partitioned(ctx):
        _, over_columns, codes = ctx.avals_in
        plan = plan_for(ctx, plan, over_columns, codes)
        fn = fn if plan is None else _sharded(gradient, plan)
    return mlir.lower_fun(fn, multiple_results=False)(ctx, *args)


mlir.register_lowering(scale_gradient_p, _lower)


def _jvp(primals, tangents, *, gradient: ScaleGradient, plan: Plan | None):
    bind = ft.partial(scale_gradient, gradient=gradient, plan=plan)
    out = bind(*primals)
    (rows, columns, codes), (rows_dot, columns_dot, _) = primals, tangents
    terms = []
    if type(rows_dot) is not ad.Zero:
        terms.append(bind(rows_dot, columns, codes))
    if type(columns_dot) is not ad.Zero:
        terms.append(bind(rows, columns_dot, codes))
    return out, ft.reduce(operator.add, terms) if terms else zero_tangent(out)


def _batch(args, dims, *, gradient: ScaleGradient, plan: Plan | None):
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    if dims[2] is None:  # The scales are mapped, but the codes are not.
        return jax.vmap(gradient, dims)(*args), 0

    def to_front(a, dim):
        if dim is None:
            return jnp.broadcast_to(a, (size, *a.shape))
        return jnp.moveaxis(a, dim, 0)

    args = map(to_front, args, dims)
    return scale_gradient(*args, gradient=gradient, plan=plan), 0


ad.primitive_jvps[scale_gradient_p] = _jvp
batching.primitive_batchers[scale_gradient_p] = _batch
