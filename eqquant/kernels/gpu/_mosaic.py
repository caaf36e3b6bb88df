"""Products of many rows on Hopper, by a kernel of Pallas and Mosaic GPU.

`_mosaic_kernel.py` describes the kernel.
"""

import dataclasses
import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from ..._jax import mosaic_gpu_kernel
from .._product import Product
from ._mosaic_plan import MosaicPlan
from ._pipeline import Pipeline


def dot(
    product: Product,
    x: Shaped[Array, "1 m size"],
    codes: Shaped[Array, "1 rows packed"],
    scales: Float[Array, "1 rows blocks"],
    x_unit: Float[Array, "1 m 1"] | None = None,
    *,
    operand: str,
    pipeline: Pipeline,
    interpret: bool = False,
) -> Float[Array, "1 m rows"]:
    """Compute a product that [`_pipeline.why_not`][] accepts.

    If `operand` is int8, both operands are int8, and `x_unit` has the scale of each row
    of `x`.
    """
    # Some versions of jaxlib have no Mosaic for GPUs.
    from . import _mosaic_kernel

    if interpret:  # Interpret mode supports no larger clusters.
        pipeline = dataclasses.replace(pipeline, cluster=1)
    plan = MosaicPlan(product, pipeline, jnp.dtype(operand), interpret)
    m, rows = product.m, product.rows
    x, codes, scales = x[0], codes[0], scales[0]
    # Copies from swizzled rows take multiples of eight rows.
    x = jnp.pad(x, ((0, -m % 8), (0, 0)))
    if not plan.blocked:
        # Threads read scales without bounds checks.
        scales = scales[:, 0].astype(jnp.float32)
        scales = jnp.pad(scales, (0, plan.padded_rows - rows))
    x_scales = []
    if x_unit is not None:
        x_unit = x_unit[0, :, 0].astype(jnp.float32)
        x_scales.append(jnp.pad(x_unit, (0, plan.padded_m - m)))
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
    )(x, codes, scales, *x_scales)
    return out[None, :m, :rows]


def _pad(plan: MosaicPlan, x, codes, scales):
    """Pad operands to whole tiles: interpret mode does not fill out-of-bounds copies
    with zeros."""
    rows = 0, plan.padded_rows - len(codes)
    columns = plan.steps * plan.columns - plan.product.size
    x = jnp.pad(x, ((0, plan.padded_m - len(x)), (0, columns)))
    codes = jnp.pad(codes, (rows, (0, -codes.shape[1] % plan.width)))
    if plan.blocked:
        scales = jnp.pad(scales, (rows, (0, -scales.shape[1] % 4)))
    return x, codes, scales
