"""Products by a kernel of Pallas and Triton, which `_triton_kernel.py` describes."""

import functools as ft

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int8, Shaped

from ...formats import Format
from ._lookup import Decoder
from ._triton_plan import subtile_bytes as subtile_bytes, Tiles as Tiles, TritonPlan


def dot(
    x: Float[Array, "batch m size"] | Int8[Array, "batch m size"],
    codes: Shaped[Array, "batch rows packed"],
    scales: Float[Array, "batch rows blocks"],
    x_unit: Float[Array, "batch m 1"] | None = None,
    *,
    format: Format,
    contract_rows: bool,
    operand,
    parts: tuple[int, int],
    tiles: Tiles,
    out_dtype,
    interpret: bool = False,
) -> Float[Array, "batch m out"]:
    """Return `x @ w` if `contract_rows`, otherwise `x @ w.T`.

    The activation and the weight are sums of `parts` operands of dtype `operand`. If
    that is int8, the activation and the codes are int8, `x_unit` has the scale of each
    row of the activation, and each row of the weight has one scale.
    """
    # Some versions of jaxlib have no Triton.
    from jax.experimental.pallas import triton as plgpu

    from . import _triton_kernel

    batch, m, _ = x.shape
    _, rows, packed = codes.shape
    decoder = None
    if jnp.dtype(operand) != jnp.int8:
        pairs = 2 if tiles.m > 64 and not contract_rows else 1
        decoder = Decoder(format, operand, parts[1], interpret, pairs)
    plan = TritonPlan(
        format,
        tiles,
        decoder,
        operand,
        parts,
        contract_rows,
        batch=batch,
        m=m,
        rows=rows,
        packed=packed,
        blocks=scales.shape[-1],
        out_dtype=jnp.float32 if tiles.split > 1 else out_dtype,
        interpret=interpret,
    )
    assert not contract_rows or (decoder is not None and plan.subtile_blocks == 1)

    def like(x):
        """Return a result that varies over the same mesh axes as the activation."""
        shape = tiles.split * batch, m, plan.out_size
        return jnp.broadcast_to(x[:1, :1, :1].astype(plan.out_dtype), shape)

    x_scales = () if x_unit is None else (x_unit.astype(jnp.float32),)
    out = pl.pallas_call(
        ft.partial(_triton_kernel.kernel, plan),
        grid=plan.grid,
        out_shape=jax.eval_shape(like, x),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiles.warps, num_stages=tiles.stages
        ),
        interpret=interpret,
        name=f"{format.name}_{'rows' if contract_rows else 'columns'}",
    )(x, codes, scales, *x_scales)
    if tiles.split > 1:
        out = jnp.sum(out.reshape(tiles.split, batch, m, plan.out_size), 0)
    return out.astype(out_dtype)
