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


# A tile is double-buffered, so only part of the vector memory is available.
_largest_tile = 2**20


def round_rows(
    x: Float[Array, "*batch m size"],
    over: tuple[str, ...] = (),
    *,
    interpret: bool = False,
) -> tuple[Int8[Array, "*batch m size"], Float[Array, "*batch m 1"]]:
    """Compute [`eqquant.kernels.round_int8`][] in one pass."""
    *batch, m, size = x.shape
    most_rows = _largest_tile // size // 32 * 32
    if over or m <= 32 or size % lanes or not most_rows or x.dtype.itemsize > 4:
        return round_int8(x.astype(jnp.float32), over)
    bm = min(math.ceil(m / 32) * 32, most_rows, 256)
    x = pad_to(x.reshape(1, -1, size), 1, bm)
    rows, scale = _round(x, None, bm, False, interpret)
    count = math.prod(batch) * m
    unpad = lambda a, last: jnp.reshape(a[0, :count, :last], (*batch, m, last))
    return unpad(rows, size), unpad(scale, 1)


def can_round_along(shape: tuple[int, ...], axis: int) -> bool:
    """Check whether [`round_along`][] takes an array."""
    size, rows = shape[axis], shape[-3 - axis]
    if size % lanes or rows % lanes:
        return False
    return size * (32 if axis == -1 else lanes) <= 2 * _largest_tile


def round_along(
    x: Float[Array, "*batch rows columns"],
    factor: Float[Array, "*batch _ _"] | None,
    axis: int,
    *,
    interpret: bool = False,
) -> tuple[Int8[Array, "*batch rows columns"], Float[Array, "*batch _ _"]]:
    """Round `x * factor` to int8 with one scale per row along an axis, which is -1 or
    -2. Scales have one element along the axis, and factors one along the other.

    Along axis -2, the kernel transposes each tile. The returned codes are the transpose
    of what it writes, so a product that takes them transposed reads them as they are.
    """
    *batch, _, _ = x.shape
    size, rows = x.shape[axis], x.shape[-3 - axis]
    is_transposed = axis == -2
    x = x.reshape(-1, *x.shape[-2:])
    if factor is not None:
        factor = factor.reshape(-1, 1, size).astype(jnp.float32)
    bm = lanes if is_transposed else 32
    while bm < 256 and rows % (2 * bm) == 0 and 2 * bm * size <= _largest_tile:
        bm *= 2
    codes, scales = _round(x, factor, bm, is_transposed, interpret)
    codes = codes.reshape(*batch, rows, size)
    scales = scales[..., :1].reshape(*batch, rows, 1)
    if is_transposed:
        return jnp.swapaxes(codes, -1, -2), jnp.swapaxes(scales, -1, -2)
    return codes, scales


def _round(x, factor, bm: int, is_transposed: bool, interpret: bool):
    """Return codes, and scales in each lane, for tiles of `bm` rows.

    If `is_transposed`, `x` and its tiles have these rows as columns.
    """
    batch, *shape = x.shape
    rows, size = shape[::-1] if is_transposed else shape

    def kernel(x, *rest):
        *factor, out, scale = rest
        tile = x[0].astype(jnp.float32)
        tile = tile.T if is_transposed else tile
        for each in factor:
            tile = tile * each[0]
        codes, row_scale = round_int8(tile)
        out[0] = codes
        scale[0] = jnp.broadcast_to(row_scale, (bm, lanes))

    spec = lambda columns: pl.BlockSpec((1, bm, columns), lambda b, i: (b, i, 0))
    of_x = spec(size)
    if is_transposed:
        of_x = pl.BlockSpec((1, size, bm), lambda b, i: (b, 0, i))
    of_factor = pl.BlockSpec((1, 1, size), lambda b, i: (b, 0, 0))
    return pl.pallas_call(
        kernel,
        grid=(batch, rows // bm),
        in_specs=[of_x] if factor is None else [of_x, of_factor],
        out_specs=[spec(size), spec(lanes)],
        out_shape=[
            result_like(x, rows, size, jnp.int8),
            result_like(x, rows, lanes, jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=2**26
        ),
        interpret=interpret,
        name="round_columns" if is_transposed else "round_rows",
    )(x, *([] if factor is None else [factor]))
