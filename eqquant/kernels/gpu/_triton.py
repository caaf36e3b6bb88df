"""Products by a kernel of Pallas and Triton, which `_triton_kernel.py` describes."""

import functools as ft

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int8, Int32, Shaped

from .._product import Product
from ._triton_plan import (
    planes_in as planes_in,
    row_bytes as row_bytes,
    subtile_bytes as subtile_bytes,
    Tiles as Tiles,
    TritonPlan,
    unit_bytes as unit_bytes,
)
from ._windows import WindowDecoder, words


def dot(
    product: Product,
    x: Float[Array, "batch m size"] | Int8[Array, "batch m size"],
    codes: Shaped[Array, "stack rows packed"],
    scales: Float[Array, "some rows blocks"],
    x_unit: Float[Array, "batch m 1"] | None = None,
    index: Int32[Array, " batch"] | None = None,
    *,
    operand: str,
    parts: tuple[int, int],
    tiles: Tiles,
    interpret: bool = False,
    stacked_scales: bool = False,
) -> Float[Array, "batch m out"]:
    """Compute a product.

    The activation and the weight are sums of `parts` operands of dtype `operand`. If
    that is int8, the activation and the codes are int8, `x_unit` has the scale of each
    row of the activation, and each row of the weight has one scale. With an index,
    codes are a stack, and scales as well if `stacked_scales`.
    """
    # Some versions of jaxlib have no Triton.
    from jax.experimental.pallas import triton as plgpu

    from . import _triton_kernel

    plan = TritonPlan(product, tiles, jnp.dtype(operand), parts, interpret)
    if product.contract_rows:
        assert plan.decoder is not None and plan.subtile_blocks == 1
    dtype = jnp.float32 if tiles.split > 1 else product.out_dtype
    shape = plan.batch, product.m, product.free

    def like(x):
        """Return a result that varies over the same mesh axes as the activation."""
        whole = tiles.split * plan.batch, *shape[1:]
        return jnp.broadcast_to(x[:1, :1, :1].astype(dtype), whole)

    others = () if x_unit is None else (x_unit.astype(jnp.float32),)
    others = others if index is None else (*others, index)
    others = (*others, *map(jnp.asarray, plan.positions))
    if isinstance(plan.decoder, WindowDecoder):
        codes, others = words(codes), (*others, jnp.asarray(plan.decoder.table))
        if not product.contract_rows:
            by_plane = x.reshape(*x.shape[:-1], -1, plan.planes)
            x = jnp.swapaxes(by_plane, -2, -1).reshape(x.shape)
    stacked = index is not None, stacked_scales
    out = pl.pallas_call(
        ft.partial(_triton_kernel.kernel, plan, stacked),
        grid=plan.grid,
        out_shape=jax.eval_shape(like, x),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiles.warps, num_stages=tiles.stages
        ),
        interpret=interpret,
        name=f"{product.format.name}_{'rows' if product.contract_rows else 'columns'}",
    )(x, codes, scales, *others)
    if tiles.split > 1:
        out = jnp.sum(out.reshape(tiles.split, *shape), 0)
    return out.astype(product.out_dtype)
