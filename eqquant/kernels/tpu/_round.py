"""Round activations to int8 in one pass.

XLA takes two passes. For 2048 rows they take longer than the product, on a chip that
multiplies int8.
"""

import math

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int8

from .._int8 import round_int8
from ._tiles import lanes, pad_to, result_like


def round_rows(
    x: Float[Array, "*batch m size"],
    over: tuple[str, ...] = (),
    *,
    interpret: bool = False,
) -> tuple[Int8[Array, "*batch m size"], Float[Array, "*batch m 1"]]:
    """Compute [`eqquant.kernels.round_int8`][] in one pass."""
    *batch, m, size = x.shape
    # A tile is double-buffered, so only part of the vector memory is available.
    most_rows = 2**20 // size // 32 * 32
    if over or m <= 32 or size % lanes or not most_rows or x.dtype.itemsize > 4:
        return round_int8(x.astype(jnp.float32), over)
    bm = min(math.ceil(m / 32) * 32, most_rows, 256)
    x = pad_to(x.reshape(1, -1, size), 1, bm)

    def kernel(x, out, scale):
        rows, row_scale = round_int8(x[0].astype(jnp.float32))
        out[0] = rows
        scale[0] = jnp.broadcast_to(row_scale, (bm, lanes))

    spec = lambda columns: pl.BlockSpec((1, bm, columns), lambda i: (0, i, 0))
    rows, scale = pl.pallas_call(
        kernel,
        grid=(x.shape[1] // bm,),
        in_specs=[spec(size)],
        out_specs=[spec(size), spec(lanes)],
        out_shape=[
            result_like(x, x.shape[1], size, jnp.int8),
            result_like(x, x.shape[1], lanes, jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="round_rows",
    )(x)
    count = math.prod(batch) * m
    unpad = lambda a, last: jnp.reshape(a[0, :count, :last], (*batch, m, last))
    return unpad(rows, size), unpad(scale, 1)
