"""Matrix products, which become `quantized_dot`."""

import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...arrays import Contraction, ImplicitArray
from ...partition import request_in_order
from ...primitives import straight_rounded
from ._registry import Decoded, register_names, rule_for


@rule_for(lax.dot_general_p)
def _dot_general(
    lhs, rhs, *, dimension_numbers, precision, preferred_element_type, out_sharding
):
    (over_lhs, over_rhs), (batch_lhs, batch_rhs) = dimension_numbers
    if isinstance(lhs, ImplicitArray) and isinstance(rhs, ImplicitArray):
        return NotImplemented
    quantized_lhs = isinstance(lhs, ImplicitArray)
    q, x = (lhs, rhs) if quantized_lhs else (rhs, lhs)
    over = list(zip(over_lhs, over_rhs, strict=True))
    batch = list(zip(batch_lhs, batch_rhs, strict=True))
    if not quantized_lhs:
        over = [(j, i) for i, j in over]
        batch = [(j, i) for i, j in batch]
    out_dtype = preferred_element_type or _dot_dtype(lhs.dtype, rhs.dtype)
    # `contract` returns the free axes of `x` first. `dot_general` returns the free
    # axes of its left operand first.
    first, free = len(batch), q.ndim - len(over) - len(batch)
    order = list(range(x.ndim - len(over) + free))
    if quantized_lhs:
        order[first:] = order[first + free :] + order[first : first + free]
    spec = request_in_order(out_sharding, order)
    out = q.contract(x, Contraction(over, batch, precision, out_dtype, spec))
    if out is NotImplemented:
        x, is_rounded = rounded(q, x, [axis for _, axis in over])
        if not is_rounded:
            return NotImplemented
        dense = ft.partial(
            lax.dot_general_p.bind,
            dimension_numbers=dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
        return Decoded(q, lambda w: dense(w, x) if quantized_lhs else dense(x, w))
    if quantized_lhs:
        out = jnp.moveaxis(out, range(-free, 0), range(first, first + free))
    return out


def rounded(q: ImplicitArray, x, axes: Sequence[int]) -> tuple[Any, bool]:
    """Return the activation as rounded by a product with `q`, and whether it
    changed."""
    if not (q.rounds_activations and axes and jnp.issubdtype(x.dtype, jnp.floating)):
        return x, False
    return straight_rounded(x, tuple(axes)), True


def _dot_dtype(lhs, rhs):
    """Return the result dtype of `lax` for two dtypes. `jnp` promotes differently."""
    if lhs == rhs:
        return lhs
    vectors = [jax.ShapeDtypeStruct((1,), dtype) for dtype in (lhs, rhs)]
    return jax.eval_shape(lax.dot, *vectors).dtype


@register_names("ragged_dot_general")
def _ragged_dot_general(
    lhs,
    rhs,
    group_sizes,
    *,
    ragged_dot_dimension_numbers,
    precision,
    preferred_element_type,
):
    """Multiply each group of consecutive rows by its own weight: `lax.ragged_dot`.

    The rows are cut into tiles. A tile that contains several groups is multiplied once
    per group, with the rows of all other groups masked. So there are at most
    `tiles + groups` products, each with the weight of one group.
    """
    numbers = ragged_dot_dimension_numbers
    dims = numbers.dot_dimension_numbers
    if tuple(map(tuple, (*dims[0], *dims[1]))) == ((1,), (2,), (), ()):
        rhs, dims = rhs.swapaxes(1, 2), (((1,), (1,)), ((), ()))  # The derivative.
    if (
        isinstance(lhs, ImplicitArray)
        or tuple(map(tuple, (*dims[0], *dims[1]))) != ((1,), (1,), (), ())
        or tuple(numbers.lhs_ragged_dimensions) != (0,)
        or tuple(numbers.rhs_group_dimensions) != (0,)
        or rhs.ndim != 3
        or lhs.ndim != 2
    ):
        return NotImplemented
    out_dtype = preferred_element_type or _dot_dtype(lhs.dtype, rhs.dtype)
    if not jnp.issubdtype(out_dtype, jnp.floating):
        return NotImplemented
    m, _ = lhs.shape
    groups, _, n = rhs.shape
    height = max(1, min(128, m))
    tiles = -(-m // height)
    x = jnp.pad(lhs, ((0, tiles * height - m), (0, 0))).reshape(tiles, height, -1)
    stop = jnp.cumsum(group_sizes)
    # The overlapping (tile, group) pairs, in order of rows: every end of a tile and
    # every end of a group starts a new pair.
    ends = jnp.sort(
        jnp.concatenate([jnp.arange(1, tiles + 1) * height, jnp.minimum(stop, m)])
    )
    begins = jnp.concatenate([jnp.zeros((1,), ends.dtype), ends[:-1]])
    group = jnp.searchsorted(stop, begins, side="right")
    tile = jnp.minimum(begins // height, tiles - 1)
    rows = jnp.arange(height)
    contraction = Contraction([(0, 1)], (), precision, out_dtype)

    def step(out, which):
        begin, end, tile, group = which
        inside = jnp.clip(group, 0, groups - 1)
        weight = rhs.dynamic_slice((inside, 0, 0), (1, *rhs.shape[1:])).squeeze((0,))
        y = weight.contract(x[tile], contraction)
        row = tile * height + rows
        mine = (row >= begin) & (row < end) & (group < groups)
        return out.at[tile].add(jnp.where(mine[:, None], y, 0)), None

    out = jnp.zeros((tiles, height, n), out_dtype)
    out, _ = lax.scan(step, out, (begins, ends, tile, group))
    return out.reshape(tiles * height, n)[:m]
