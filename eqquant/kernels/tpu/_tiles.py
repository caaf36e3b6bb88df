"""How operands are cut and ordered for the kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from ...formats import Format


# Of a register, along its last axis.
lanes = 128


def pad_to(x: Array, axis: int, multiple: int) -> Array:
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


def to_tiles(
    x: Shaped[Array, "batch m columns"], tile: int, format: Format
) -> Shaped[Array, "batch m padded"]:
    """The columns in plane order within each tile of so many bytes."""
    planes = 8 // format.bits
    x = pad_to(x, -1, tile * planes)
    if planes == 1:
        return x
    batch, m, columns = x.shape
    width = format.group // planes
    x = x.reshape(batch, m, columns // (tile * planes), tile // width, planes, width)
    return jnp.swapaxes(x, -3, -2).reshape(batch, m, columns)


def from_tiles(
    x: Float[Array, "batch m padded"], tile: int, columns: int, format: Format
) -> Float[Array, "batch m columns"]:
    planes = 8 // format.bits
    if planes > 1:
        batch, m, padded = x.shape
        width = format.group // planes
        x = x.reshape(batch, m, padded // (tile * planes), planes, tile // width, width)
        x = jnp.swapaxes(x, -3, -2).reshape(batch, m, padded)
    return x[..., :columns]


def result_like(
    x: Shaped[Array, "batch m size"], free: int, dtype=jnp.float32
) -> jax.ShapeDtypeStruct:
    """The shape of a result, which inside of shard_map varies as the operands do."""
    shape = (*x.shape[:2], free)
    like = lambda x: jnp.broadcast_to(x[:, :, :1].astype(dtype), shape)
    return jax.eval_shape(like, x)
