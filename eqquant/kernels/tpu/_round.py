"""Activations to int8, one pass over them: XLA makes two, which together take longer
than the product of 2048 rows on a chip that multiplies int8."""

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
    """As [`eqquant._int8.round_int8`][]."""
    *batch, m, size = x.shape
    # Rows of whole registers that fit in the memory of a core, several times.
    most = 2**20 // size // 32 * 32
    if over or m <= 32 or size % lanes or not most or x.dtype.itemsize > 4:
        return round_int8(x.astype(jnp.float32), over)
    bm = min(math.ceil(m / 32) * 32, most, 256)
    x = pad_to(x.reshape(1, -1, size), 1, bm)

    def kernel(x, out, unit):
        rows, worth = round_int8(x[0].astype(jnp.float32))
        out[0] = rows
        unit[0] = jnp.broadcast_to(worth, (bm, lanes))

    spec = lambda columns: pl.BlockSpec((1, bm, columns), lambda i: (0, i, 0))
    rows, unit = pl.pallas_call(
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
    like = lambda a, last: jnp.reshape(a[0, :count, :last], (*batch, m, last))
    return like(rows, size), like(unit, 1)
