"""The gradient of a product with respect to the scales of its weight."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from ..._jax import wide_dtype
from ...formats import Format, to_plane_order
from ._tiles import tile_rows


def scale_gradient(
    ct: Float[Array, "*batch m rows"],
    x: Float[Array, "*batch m columns"],
    codes: Shaped[Array, "*batch rows packed"],
    blocks: int,
    *,
    format: Format,
    dtype,
) -> Float[Array, "*batch rows blocks"]:
    """The gradient of `sum(ct * (x @ w.T))` with respect to the scales of `w`.

    It is `sum_m ct[m, row] * sum_(k in block) x[m, k] * level[row, k]`, computed for
    one tile of rows at a time.
    """
    if codes.ndim > 2:
        options = dict(blocks=blocks, format=format, dtype=dtype)
        return lax.map(lambda args: scale_gradient(*args, **options), (ct, x, codes))
    rows, _ = codes.shape
    compute = wide_dtype(dtype)
    if 0 in (*codes.shape, *x.shape):
        return jnp.zeros((rows, blocks), dtype)
    x = to_plane_order(x, format.bits, format.plane_group).astype(compute)
    ct = ct.astype(compute)
    height = tile_rows(rows, x.shape[-1] * x.dtype.itemsize)

    def one_tile(codes, ct):
        levels = format.levels(format.states(codes), compute)
        height, planes, size = levels.shape
        weight_gradient = lax.dot_general(
            ct, x, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST
        )
        product = levels.reshape(height, -1) * weight_gradient
        product = product.reshape(height, planes, blocks, size // blocks)
        return product.sum((1, 3)).astype(dtype)

    def step(i):
        return one_tile(
            lax.dynamic_slice_in_dim(codes, i * height, height, 0),
            lax.dynamic_slice_in_dim(ct, i * height, height, 1),
        )

    count, rest = divmod(rows, height)
    out = lax.map(step, jnp.arange(count)).reshape(count * height, blocks)
    if rest:
        out = jnp.concatenate([out, one_tile(codes[-rest:], ct[:, -rest:])])
    return out
