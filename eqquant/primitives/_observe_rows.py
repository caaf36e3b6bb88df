"""Rows, and as a gradient what their own gradients are like.

A `custom_vjp` has the same derivatives. But mapped over, its backward rule makes the
outer product of each row by itself; here they stay one product of matrices.
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
    """`x`. With `g` its cotangent, that of `gram` is `g^T g`, that of `count` how many
    rows of `g` are not zero, and that of `power` the sum of the squares."""
    return observe_rows_p.bind(*match_varying(x, gram, count, power))


def _first(x, *_):
    return x


observe_rows_p.def_impl(_first)
observe_rows_p.def_abstract_eval(_first)
mlir.register_lowering(observe_rows_p, mlir.lower_fun(_first, multiple_results=False))


def _transpose(ct, x, gram, count, power):
    of_x = ct if ad.is_undefined_primal(x) else None
    if not ad.is_undefined_primal(gram):
        return of_x, None, None, None
    aval = gram.aval
    # Axes that were mapped over come first.
    lead = aval.ndim - 2
    mapped = ct.ndim - 2 - lead
    summed = (*range(mapped), ct.ndim - 2)
    stack = tuple(range(mapped, mapped + lead))
    g = ct.astype(aval.dtype)
    numbers = ((summed, summed), (stack, stack))
    outer = lax.dot_general(g, g, numbers, precision="highest")
    live = jnp.sum(jnp.any(ct != 0, -1).astype(aval.dtype), summed)
    return of_x, outer, live, jnp.sum(jnp.square(g), (*summed, ct.ndim - 1))


ad.deflinear2(observe_rows_p, _transpose)


def _batch(args, dims):
    x, *seen = args
    x_dim, *seen_dims = dims
    if all(dim is None for dim in seen_dims):
        return observe_rows_p.bind(jnp.moveaxis(x, x_dim, 0), *seen), 0
    size = next(
        part.shape[dim] for part, dim in zip(args, dims, strict=True) if dim is not None
    )
    at = x.ndim - (x_dim is not None) - seen[0].ndim + (seen_dims[0] is not None)

    def moved(part, dim, to):
        if dim is None:
            part, dim = jnp.broadcast_to(part, (size, *part.shape)), 0
        return jnp.moveaxis(part, dim, to)

    seen = [moved(part, dim, 0) for part, dim in zip(seen, seen_dims, strict=True)]
    return observe_rows_p.bind(moved(x, x_dim, at), *seen), at


batching.primitive_batchers[observe_rows_p] = _batch
