"""Identities whose gradients contain statistics of rows.

A `custom_vjp` has the same derivatives. But under `jax.vmap`, its backward rule
computes a separate outer product per row. These primitives keep one product of
matrices, and store the rows only once for the backward pass.
"""

import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from .._jax import match_varying
from ._batching import map_all_first


observe_rows_p = Primitive("observe_rows")
observe_product_p = Primitive("observe_product")
# The tangent of `observe_product` with `every_row`: its arguments after the first are
# the sums without `power`, and the tangents of all sums.
observed_product_p = Primitive("observed_product")
# The smallest number of columns in a block of a Gram matrix. Blocks below the diagonal
# are left out. With smaller blocks, copying slices takes more time than that saves.
_block = 1024


def observe_rows(
    x: Float[Array, "*lead rows size"],
    gram: Float[Array, "*lead size size"],
    count: Float[Array, "*lead"],
    power: Float[Array, "*lead"],
) -> Float[Array, "*lead rows size"]:
    """Return `x`.

    If `g` is the cotangent of the result, the cotangents are the upper triangle of
    `g^T g` for `gram`, the number of nonzero rows of `g` for `count`, and the sum of
    squares for `power`.
    """
    return observe_rows_p.bind(*match_varying(x, gram, count, power))


def observe_product(
    out: Float[Array, "*lead rows outputs"],
    x: Float[Array, "*lead rows size"],
    gram: Float[Array, "*lead size size"],
    count: Float[Array, "*lead"],
    power: Float[Array, "*lead"],
    peak: Float[Array, "*lead"],
    other: Float[Array, "*lead rows size"] | None = None,
    cross: Float[Array, "*lead size size"] | None = None,
    *,
    every_row: bool,
) -> Float[Array, "*lead rows outputs"]:
    """Return `out`, the product of a weight with the rows of `x`.

    If `g` is the cotangent of the result, a row is counted if it is not zero in `g`, or
    always with `every_row`. The cotangents are the upper triangle of `x^T x` of the
    counted rows for `gram`, their number for `count`, the sum of squares of `g` for
    `power`, and the sum of the largest magnitude of each counted row for `peak`. With
    `other` rows, the cotangent of `cross` is `other^T x` of the counted rows.
    """
    if other is None:
        args = out, x, gram, count, power, peak
    else:
        args = out, x, other, gram, count, power, peak, cross
    return observe_product_p.bind(*match_varying(*args), every_row=every_row)


def _first(x, *_, **__):
    return x


def _summed(ndim: int, lead: int) -> tuple[int, ...]:
    """Return the axes of rows, and the mapped axes before the `lead` axes."""
    return (*range(ndim - 2 - lead), ndim - 2)


def _cross(
    x: Float[Array, "..."], y: Float[Array, "..."], lead: int
) -> Float[Array, "..."]:
    """Return `x^T y`, for each index of the `lead` axes."""
    summed = _summed(x.ndim, lead)
    stack = tuple(range(x.ndim - 2 - lead, x.ndim - 2))
    numbers = (summed, summed), (stack, stack)
    return lax.dot_general(x, y, numbers, precision="highest")


def _upper_gram(x: Float[Array, "..."], lead: int) -> Float[Array, "..."]:
    """Return the upper triangle of `x^T x`, for each index of the `lead` axes."""
    product = ft.partial(_cross, lead=lead)
    blocks = jnp.array_split(x, max(1, x.shape[-1] // _block), -1)
    if len(blocks) == 1:
        return product(x, x)
    rows, below = [], 0
    for i, block in enumerate(blocks):
        row = [product(block, other) for other in blocks[i:]]
        row = jnp.concatenate(row, -1)
        rows.append(jnp.pad(row, [(0, 0)] * (lead + 1) + [(below, 0)]))
        below += block.shape[-1]
    return jnp.concatenate(rows, -2)


def sums_of_rows(g: Float[Array, "..."], lead: int, dtype):
    """Return the upper triangle of `g^T g`, the number of nonzero rows, and the sum of
    squares, for each index of the `lead` axes before the last two. Axes before these
    were mapped."""
    summed, wide = _summed(g.ndim, lead), g.astype(dtype)
    live = jnp.sum(jnp.any(g != 0, -1).astype(dtype), summed)
    return _upper_gram(wide, lead), live, _power(g, lead, dtype)


def _power(ct, lead: int, dtype):
    return jnp.sum(jnp.square(ct.astype(dtype)), (*_summed(ct.ndim, lead), ct.ndim - 1))


def _sums_of_inputs(rows, live, lead: int, dtype):
    """Return the upper triangle of `x^T x`, the number of rows, the sum of their
    largest magnitudes, and `other^T x` if there are other rows. `live` shows which rows
    count; with None, all do."""
    summed = _summed(rows[0].ndim, lead)
    if live is None:
        # Without a mask, the compiler finds that weights with the same inputs have the
        # same sums. Masks of ones would be separate arguments of the body of a `scan`.
        x, *others = [r.astype(dtype) for r in rows]
        stack = x.shape[x.ndim - 2 - lead : x.ndim - 2]
        count = jnp.full(stack, math.prod(x.shape[axis] for axis in summed), dtype)
    else:
        x, *others = [jnp.where(live[..., None], r, 0).astype(dtype) for r in rows]
        count = jnp.sum(live.astype(dtype), summed)
    peak = jnp.sum(jnp.max(jnp.abs(x), -1), summed)
    crosses = [_cross(other, x, lead) for other in others]
    return _upper_gram(x, lead), count, peak, *crosses


def _transpose_rows(ct, x, gram, *_):
    x_ct = ct if ad.is_undefined_primal(x) else None
    if not ad.is_undefined_primal(gram):
        return x_ct, None, None, None
    return x_ct, *sums_of_rows(ct, gram.aval.ndim - 2, gram.aval.dtype)


def _num_rows(args: Sequence[Any]) -> int:
    """Return the number of the first arguments, which have rows. The number of sums is
    larger by two."""
    return len(args) // 2 - 1


def _transpose_product(ct, *args, every_row: bool):
    n = _num_rows(args)
    (out, *rows), (gram, *_) = args[:n], args[n:]
    if type(ct) is ad.Zero:
        return [None] * len(args)
    out_ct = ct if ad.is_undefined_primal(out) else None
    if not ad.is_undefined_primal(gram):
        return [out_ct, *[None] * (len(args) - 1)]
    lead, dtype = gram.aval.ndim - 2, gram.aval.dtype
    live = None if every_row else jnp.any(ct != 0, -1)
    total, count, *others = _sums_of_inputs(rows, live, lead, dtype)
    power = _power(ct, lead, dtype)
    return [out_ct, *[None] * len(rows), total, count, power, *others]


def _product_jvp(primals, tangents, *, every_row: bool):
    n = _num_rows(primals)
    (out, *rows), sums = primals[:n], primals[n:]
    out_t, *sums_t = map(ad.instantiate_zeros, (tangents[0], *tangents[n:]))
    value = observe_product_p.bind(out, *rows, *sums, every_row=every_row)
    if not every_row:
        return value, observe_product_p.bind(out_t, *rows, *sums_t, every_row=False)
    # The sums of all rows are known now, so the backward pass does not store the rows.
    known = _sums_of_inputs(rows, None, sums[0].ndim - 2, sums[0].dtype)
    return value, observed_product_p.bind(out_t, *known, *sums_t)


def _num_known(args: Sequence[Any]) -> int:
    """Return the number of sums in the arguments of `observed_product`."""
    return len(args) // 2 - 1


def _observed_jvp(primals, tangents):
    end = _num_known(primals) + 1
    out_t, *sums_t = map(ad.instantiate_zeros, (tangents[0], *tangents[end:]))
    value = observed_product_p.bind(*primals)
    return value, observed_product_p.bind(out_t, *primals[1:end], *sums_t)


def _transpose_observed(ct, out, *args):
    n = _num_known((out, *args))
    (gram, count, *others), (gram_t, *_) = args[:n], args[n:]
    if type(ct) is ad.Zero:
        return [None] * (len(args) + 1)
    out_ct = ct if ad.is_undefined_primal(out) else None
    if not ad.is_undefined_primal(gram_t):
        return [out_ct, *[None] * len(args)]
    power = _power(ct, gram.ndim - 2, gram.dtype)
    return [out_ct, *[None] * n, gram, count, power, *others]


def _batch(primitive: Primitive, args, dims, **params) -> Any:
    """Map rows and sums."""
    num_rows = _num_rows(args)
    size = next(
        part.shape[dim] for part, dim in zip(args, dims, strict=True) if dim is not None
    )

    def moved(part, dim, to):
        if dim is None:
            part, dim = jnp.broadcast_to(part, (size, *part.shape)), 0
        return jnp.moveaxis(part, dim, to)

    rows, sums = args[:num_rows], args[num_rows:]
    rows_dims, sums_dims = dims[:num_rows], dims[num_rows:]
    at = 0
    if any(dim is not None for dim in sums_dims):
        at = rows[0].ndim - (rows_dims[0] is not None)
        at -= sums[0].ndim - (sums_dims[0] is not None)
        sums = [moved(part, dim, 0) for part, dim in zip(sums, sums_dims, strict=True)]
    rows = [moved(part, dim, at) for part, dim in zip(rows, rows_dims, strict=True)]
    return primitive.bind(*rows, *sums, **params), at


def _batch_observed(args, dims):
    end = _num_known(args) + 1
    out, *known = args[:end]
    moved = map_all_first(args, dims)
    if any(dim is not None for dim in dims[end:]):
        at = out.ndim - (dims[0] is not None)
        at -= known[0].ndim - (dims[1] is not None)
        moved[0] = jnp.moveaxis(moved[0], 0, at)
        return observed_product_p.bind(*moved), at
    sums = [jnp.sum(part, 0) for part in moved[1:end]]
    return observed_product_p.bind(moved[0], *sums, *args[end:]), 0


for _primitive in (observe_rows_p, observe_product_p, observed_product_p):
    _primitive.def_impl(_first)
    _primitive.def_abstract_eval(_first)
    mlir.register_lowering(_primitive, mlir.lower_fun(_first, multiple_results=False))
for _primitive in (observe_rows_p, observe_product_p):
    batching.primitive_batchers[_primitive] = ft.partial(_batch, _primitive)
ad.deflinear2(observe_rows_p, _transpose_rows)
ad.primitive_jvps[observe_product_p] = _product_jvp
batching.primitive_batchers[observed_product_p] = _batch_observed
ad.primitive_jvps[observed_product_p] = _observed_jvp
ad.primitive_transposes[observe_product_p] = _transpose_product
ad.primitive_transposes[observed_product_p] = _transpose_observed
