"""The identity of rows, whose gradients contain statistics of the cotangent of the
rows.

A `custom_vjp` has the same derivatives. But under `jax.vmap`, its backward rule
computes a separate outer product per row. This primitive keeps one product of matrices.
"""

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from .._jax import match_varying


observe_rows_p = Primitive("observe_rows")


def observe_rows(
    x: Float[Array, "*lead rows size"],
    gram: Float[Array, "*lead size size"],
    count: Float[Array, "*lead"],
    power: Float[Array, "*lead"],
) -> Float[Array, "*lead rows size"]:
    """Return `x`.

    If `g` is the cotangent of the result, the cotangents are `g^T g` for `gram`, the
    number of nonzero rows of `g` for `count`, and the sum of squares for `power`.
    """
    return observe_rows_p.bind(*match_varying(x, gram, count, power))


def _first(x, *_):
    return x


observe_rows_p.def_impl(_first)
observe_rows_p.def_abstract_eval(_first)
mlir.register_lowering(observe_rows_p, mlir.lower_fun(_first, multiple_results=False))


def _transpose(ct, x, gram, count, power):
    x_ct = ct if ad.is_undefined_primal(x) else None
    if not ad.is_undefined_primal(gram):
        return x_ct, None, None, None
    return x_ct, *sums_of_rows(ct, gram.aval.ndim - 2, gram.aval.dtype)


def sums_of_rows(g: Float[Array, "..."], lead: int, dtype):
    """Return `g^T g`, the number of nonzero rows, and the sum of squares, for each
    index of the `lead` axes before the last two. Axes before these were mapped."""
    mapped = g.ndim - 2 - lead
    summed = (*range(mapped), g.ndim - 2)
    stack = tuple(range(mapped, mapped + lead))
    wide = g.astype(dtype)
    numbers = ((summed, summed), (stack, stack))
    outer = lax.dot_general(wide, wide, numbers, precision="highest")
    live = jnp.sum(jnp.any(g != 0, -1).astype(dtype), summed)
    return outer, live, jnp.sum(jnp.square(wide), (*summed, g.ndim - 1))


ad.deflinear2(observe_rows_p, _transpose)


def _batch(args, dims):
    x, *sums = args
    x_dim, *sums_dims = dims
    if all(dim is None for dim in sums_dims):
        return observe_rows_p.bind(jnp.moveaxis(x, x_dim, 0), *sums), 0
    size = next(
        part.shape[dim] for part, dim in zip(args, dims, strict=True) if dim is not None
    )
    at = x.ndim - (x_dim is not None) - sums[0].ndim + (sums_dims[0] is not None)

    def moved(part, dim, to):
        if dim is None:
            part, dim = jnp.broadcast_to(part, (size, *part.shape)), 0
        return jnp.moveaxis(part, dim, to)

    sums = [moved(part, dim, 0) for part, dim in zip(sums, sums_dims, strict=True)]
    return observe_rows_p.bind(moved(x, x_dim, at), *sums), at


batching.primitive_batchers[observe_rows_p] = _batch
