"""The fast Hadamard transform of an axis, block by block."""

import functools as ft
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from .._jax import (
    define_impl,
    has_explicit_axes,
    is_automatically_partitioned,
    is_exported,
    wide_dtype,
)
from ..kernels import cpu


hadamard_p = Primitive("hadamard")
# The size of one factor of the transform, like the matrix units of most accelerators.
_largest_factor = 128


def hadamard(x: Float[Array, "..."], axis: int, block: int) -> Float[Array, "..."]:
    """Multiply each block of an axis by Sylvester's orthogonal Hadamard matrix.

    The transform is its own inverse. The matrix of a large block is a Kronecker
    product of smaller matrices, which need one product each. On CPUs, a native kernel
    adds and subtracts instead.
    """
    return _hadamard(x, axis % x.ndim, block)


@ft.partial(jax.jit, static_argnames=("axis", "block"), inline=True)
def _hadamard(x: Float[Array, "..."], axis: int, block: int) -> Float[Array, "..."]:
    dtype = x.dtype
    x = jnp.moveaxis(x, axis, -1).astype(wide_dtype(dtype))
    # XLA knows how to split products over the devices of a mesh.
    rotate = hadamard_by_products if has_explicit_axes() else hadamard_p.bind
    return jnp.moveaxis(rotate(x, block=block), -1, axis).astype(dtype)


def hadamard_by_products(
    x: Float[Array, "*lead size"], *, block: int
) -> Float[Array, "*lead size"]:
    """Compute `hadamard` for the last axis, by products with matrices."""
    *lead, size = x.shape
    factors = []
    rest = block
    while rest > 1:
        factors.append(min(rest, _largest_factor))
        rest //= factors[-1]
    x = x.reshape(*lead, size // block, *reversed(factors))
    for i, factor in enumerate(factors):
        at = x.ndim - 1 - i
        matrix = jnp.asarray(_matrix(factor), x.dtype)
        x = jnp.tensordot(x, matrix, ((at,), (0,)), precision="highest")
        x = jnp.moveaxis(x, -1, at)
    return x.reshape(*lead, size)


def _matrix(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(size)


def _lower_for_cpu(ctx, x, *, block: int):
    (aval,) = ctx.avals_in
    # The compiler can split programs of XLA over devices, but not a kernel. An exported
    # program may run without the library.
    by_xla = is_automatically_partitioned(ctx) or is_exported(ctx)
    by_xla = by_xla or not cpu.rotates(aval)
    fn = hadamard_by_products if by_xla else cpu.rotate
    return mlir.lower_fun(fn, multiple_results=False)(ctx, x, block=block)


def _batch(args, dims, *, block: int):
    (x,), (dim,) = args, dims
    return hadamard_p.bind(jnp.moveaxis(x, dim, 0), block=block), 0


define_impl(hadamard_p, hadamard_by_products)
hadamard_p.def_abstract_eval(lambda x, *, block: x)
mlir.register_lowering(
    hadamard_p, mlir.lower_fun(hadamard_by_products, multiple_results=False)
)
mlir.register_lowering(hadamard_p, _lower_for_cpu, platform="cpu")
batching.primitive_batchers[hadamard_p] = _batch
# The matrix is symmetric.
ad.deflinear2(hadamard_p, lambda ct, x, *, block: [hadamard_p.bind(ct, block=block)])
