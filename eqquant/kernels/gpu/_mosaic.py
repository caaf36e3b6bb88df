"""Products of many rows on Hopper, by a kernel of Pallas and Mosaic GPU.

`_mosaic_kernel.py` describes the kernel.
"""

import dataclasses
import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from ..._jax import mosaic_gpu_kernel
from .._product import Product
from ._mosaic_plan import MosaicPlan
from ._pipeline import Pipeline


def dot(
    product: Product,
    x: Shaped[Array, "1 m size"],
    codes: Shaped[Array, "stack rows packed"],
    scales: Float[Array, "some rows blocks"],
    x_unit: Float[Array, "1 m 1"] | None = None,
    index: Int32[Array, "1"] | None = None,
    *,
    operand: str,
    pipeline: Pipeline,
    interpret: bool = False,
    stacked_scales: bool = False,
) -> Float[Array, "1 m rows"]:
    """Compute a product that [`_pipeline.why_not`][] accepts.

    If `operand` is int8, both operands are int8, and `x_unit` has the scale of each row
    of `x`. With an index, codes are a stack, and scales as well if `stacked_scales`.
    """
    # Some versions of jaxlib have no Mosaic for GPUs.
    from . import _mosaic_kernel

    if interpret:  # Interpret mode supports no larger clusters.
        pipeline = dataclasses.replace(pipeline, cluster=1)
    stacked = index is not None, stacked_scales and product.blocks > 1
    plan = MosaicPlan(product, pipeline, jnp.dtype(operand), interpret, stacked)
    m, rows = product.m, product.rows
    x, codes = x[0], codes.reshape(-1, codes.shape[-1])
    if stacked_scales and not plan.blocked:
        # One number per row: a copy costs little.
        scales = scales[index]
    scales = scales.reshape(-1, scales.shape[-1])
    # Copies from swizzled rows take multiples of eight rows.
    x = jnp.pad(x, ((0, -m % 8), (0, 0)))
    if not plan.blocked:
        # Threads read scales without bounds checks.
        scales = scales[:, 0].astype(jnp.float32)
        scales = jnp.pad(scales, (0, plan.padded_rows - rows))
    others = []
    if x_unit is not None:
        x_unit = x_unit[0, :, 0].astype(jnp.float32)
        others.append(jnp.pad(x_unit, (0, plan.padded_m - m)))
    if index is not None:
        others.append(index)
    out_shape = len(x), rows
    if interpret:
        x, codes, scales = _pad(plan, x, codes, scales)
        out_shape = plan.padded_m, plan.padded_rows
    kernel: Any = ft.partial(_mosaic_kernel.kernel, plan)
    kernel.__name__ = kernel.__qualname__ = f"{product.format.name}_columns"
    out = mosaic_gpu_kernel(
        kernel,
        jax.ShapeDtypeStruct(out_shape, product.out_dtype),
        _mosaic_kernel.scratch_types(plan),
        interpret=interpret,
        grid=(plan.clusters,),
        grid_names=("cluster",),
        cluster=(plan.pipeline.cluster,),
        cluster_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
    )(x, codes, scales, *others)
    return out[None, :m, :rows]


def _pad(plan: MosaicPlan, x, codes, scales):
    """Pad operands to whole tiles: interpret mode does not fill out-of-bounds copies
    with zeros."""
    rows = 0, plan.padded_rows - plan.product.rows
    columns = plan.steps * plan.columns - plan.product.size
    x = jnp.pad(x, ((0, plan.padded_m - len(x)), (0, columns)))
    codes = jnp.pad(codes, (rows, (0, -codes.shape[1] % plan.width)))
    if plan.blocked:
        scales = jnp.pad(scales, (rows, (0, -scales.shape[1] % 4)))
    return x, codes, scales
