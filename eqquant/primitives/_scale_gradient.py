"""The gradient of a product with respect to the scales of its weight.

It is a primitive, so that its lowering can split it over a mesh like the product. It is
linear in both factors, and its transposes are products with a weight whose scales are
the cotangent.
"""

import dataclasses
import functools as ft
import operator
from collections.abc import Callable

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._jax import (
    define_impl,
    is_automatically_partitioned,
    match_varying,
    zero_tangent,
)
from ..formats import Format, num_bytes
from ..kernels import xla
from ..partition import (
    Partition,
    partition_product,
    Plan,
    plan_for,
    plan_from_types,
    result_type,
    SCALE_GRADIENT,
)
from ._batching import map_all_first


scale_gradient_p = Primitive("quantized_scale_gradient")


@dataclasses.dataclass(frozen=True)
class ScaleGradient:
    """The static parameters: the format of the weight, and its scales per row and their
    dtype."""

    format: Format
    blocks: int
    dtype: np.dtype

    def shape(self, codes) -> tuple[int, ...]:
        return (*codes.shape[:-1], self.blocks)

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
    plan = plan_from_types(over_columns, codes, asked=plan)
    partition = plan and _partition(gradient, plan, over_rows, over_columns, codes)
    shape = gradient.shape(codes)
    return result_type(over_columns, codes, shape, gradient.dtype, partition)


def _partition(gradient: ScaleGradient, plan: Plan, *args) -> Partition:
    group = num_bytes(gradient.format.group, gradient.format.bits)
    shapes = [a.shape for a in args]
    return partition_product(
        SCALE_GRADIENT, plan, shapes, gradient.shape(args[-1]), group
    )


def _sharded(gradient: ScaleGradient, plan: Plan) -> Callable:
    def call(*args):
        partition = _partition(gradient, plan, *args)
        whole = args[-1].shape[-1]

        def local(*args):
            *args, dtype = args
            blocks = gradient.blocks
            if blocks > 1:
                blocks = blocks * args[-1].shape[-1] // whole
            return dataclasses.replace(gradient, blocks=blocks, dtype=dtype)(*args)

        return partition.sharded(local, gradient.dtype)(*args)

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
    if dims[2] is None:  # The scales are mapped, but the codes are not.
        return jax.vmap(gradient, dims)(*args), 0
    args = map_all_first(args, dims)
    return scale_gradient(*args, gradient=gradient, plan=plan), 0


ad.primitive_jvps[scale_gradient_p] = _jvp
batching.primitive_batchers[scale_gradient_p] = _batch
