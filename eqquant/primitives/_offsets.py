"""The part of the offsets of an affine weight in a product, as a dense product."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..formats import float_scales
from ..kernels import Matmul
from ..partition import dense_dot, reshard_to, spec_like
from ._activations import straight_rounded


def add_offsets(
    out: Float[Array, "*batch m out"], x, scales, offsets, matmul: Matmul
) -> Float[Array, "*batch m out"]:
    """Add the part of `offsets + shift * scales` to a product without offsets."""
    if matmul.compute.activations == "int8":
        x = straight_rounded(x, (x.ndim - 1,))
    offsets = float_scales(offsets).astype(out.dtype)
    if matmul.shift:
        offsets += matmul.shift * float_scales(scales).astype(out.dtype)
    term = offset_term(x.astype(out.dtype), offsets, matmul.contract_rows, out)
    return (out + term).astype(matmul.out_dtype)


def offset_term(
    x: Float[Array, "*batch m size"],
    offsets: Float[Array, "*batch rows blocks"],
    contract_rows: bool,
    out: Float[Array, "*batch m out"],
) -> Float[Array, "*batch m out"]:
    """Return the contribution of the offsets of a weight to the product `out`.

    All values of a block share one offset, so only the sum of the activation over each
    block is needed.
    """
    blocks = offsets.shape[-1]
    if not contract_rows:
        x = jnp.sum(x.reshape(*x.shape[:-1], blocks, x.shape[-1] // max(blocks, 1)), -1)
    stack, last = tuple(range(x.ndim - 2)), x.ndim - 1
    numbers = ((last,), (last - contract_rows,)), (stack, stack)
    shape = (*out.shape[:-1], blocks) if contract_rows else out.shape
    spec, precision = spec_like(out, shape), lax.Precision.HIGHEST
    term = dense_dot(x, offsets, numbers, precision=precision, out_sharding=spec)
    if contract_rows:
        block = out.shape[-1] // max(blocks, 1)
        term = jnp.broadcast_to(term[..., None], (*term.shape, block))
        term = term.reshape(out.shape)
    return reshard_to(term, spec_like(out, out.shape))
