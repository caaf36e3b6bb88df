"""Any contraction of a quantized array, brought to the form of the primitive.

The components of a quantized array are `(*lead, packed)`. A contraction splits the
leading axes in batch, rows and columns; the columns are merged with the blocked axis.
What is contracted is either the blocked axis (and the columns), or the rows.
"""

import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Shaped

from ..._jax import config, explicit_mesh_of, parts_of, spec_of
from ...formats import float_scales, ShortScales
from ...kernels import Precision
from ...primitives import (
    all_gather_scales,
    dense_dot,
    merge,
    names_of,
    parts_by_type,
    plan_asked,
    quantized_dot,
    split,
    split_as,
    split_by_type,
    straight_rounded,
)
from ._structure import AbstractQuantizedArray


def as_precision(precision: Any) -> Precision | None:
    """Convert a precision of lax to one of eqquant; None keeps that of the array."""
    if precision is None:
        precision = config("jax_default_matmul_precision")
        if precision is None:
            return None
    if isinstance(precision, tuple):
        strictest = {as_precision(p) for p in precision}
        return next((p for p in ("highest", "high", "default") if p in strictest), None)
    try:
        precision = lax.Precision(precision)
    except (TypeError, ValueError):
        return "highest"  # A named dot algorithm: nothing less would honour all.
    if precision == lax.Precision.HIGHEST:
        return "highest"
    return "high" if precision == lax.Precision.HIGH else "default"


def contract(
    q: AbstractQuantizedArray,
    x: Shaped[Array, "..."],
    over: Sequence[tuple[int, int]],
    batch: Sequence[tuple[int, int]] = (),
    *,
    precision: Any = None,
    out_dtype=None,
    out_sharding: PartitionSpec | None = None,
):
    """`ImplicitArray.contract`, of a quantized array: one `quantized_dot`.

    Returns NotImplemented where `q` would have to be decoded in full.
    """
    if out_dtype is None:
        out_dtype = jnp.promote_types(x.dtype, q.dtype)
    if not jnp.issubdtype(out_dtype, jnp.floating):
        return NotImplemented
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.promote_types(x.dtype, q.dtype))

    x_of = dict(over)
    blocked = q.blocked_axes
    batch_axes = [axis for axis, _ in batch]
    contracted_blocked = [axis for axis in blocked if axis in x_of]
    if any(axis in blocked for axis in batch_axes):
        return NotImplemented
    if 0 < len(contracted_blocked) < len(blocked):
        q = q.unflatten()
        if q is NotImplemented:
            return NotImplemented
        how = {"precision": precision, "out_sharding": out_sharding}
        return contract(q, x, over, batch, out_dtype=out_dtype, **how)

    return _contract(
        q,
        x,
        over=tuple(over),
        batch=tuple(batch),
        precision=as_precision(precision),
        out_dtype=jnp.dtype(out_dtype),
        out_sharding=out_sharding,
    )


# One program, also where it is called eagerly.
@ft.partial(
    jax.jit,
    static_argnames=("over", "batch", "precision", "out_dtype", "out_sharding"),
    inline=True,
)
def _contract(
    q: AbstractQuantizedArray,
    x: Float[Array, "..."],
    *,
    over: tuple[tuple[int, int], ...],
    batch: tuple[tuple[int, int], ...],
    precision: Precision | None,
    out_dtype,
    out_sharding: PartitionSpec | None,
) -> Float[Array, "..."]:
    x_of = dict(over)
    blocked, lead = q.blocked_axes, q.lead_axes
    batch_axes = [axis for axis, _ in batch]
    contract_rows = not any(axis in x_of for axis in blocked)
    contracted = [axis for axis in lead if axis in x_of]
    free = [axis for axis in lead if axis not in x_of and axis not in batch_axes]
    rows, columns = (contracted, free) if contract_rows else (free, contracted)

    sizes, num_batch, padding = dict(enumerate(q.shape)), len(batch), q.padding
    stack = [num_batch] if batch else []
    order = [lead.index(axis) for axis in (*batch_axes, *rows, *columns)]
    codes = jnp.transpose(q.codes, (*order, len(order)))
    parts, names = parts_by_type(codes), split_by_type(codes)
    if columns and jax.tree.leaves(q.scales)[0].shape[-1] % parts[-1]:
        parts[-1] = 1  # Parts of blocks would be what is merged.

    def component(a):
        a = jnp.transpose(a, (*order, len(order)))
        return merge(a, [*stack, len(rows), len(columns) + 1], parts)

    # The activation: (batch, free, contracted in the order of storage).
    used = {axis for _, axis in (*over, *batch)}
    x_free = [axis for axis in range(x.ndim) if axis not in used]
    x_over = [x_of[axis] for axis in (rows if contract_rows else (*columns, *blocked))]
    x = jnp.transpose(x, (*(axis for _, axis in batch), *x_free, *x_over))
    before = num_batch + len(x_free)
    free_shape = list(x.shape[num_batch:before])
    seen = [*parts[:num_batch], *parts_by_type(x)[num_batch:before]]
    kept = [*names[:num_batch], *split_by_type(x)[num_batch:before]]
    last = -1 - len(columns)
    scales, offsets, plan = q.scales, q.offsets, q.plan
    mesh = explicit_mesh_of(q.codes) or explicit_mesh_of(x)
    if out_sharding is not None and mesh is not None:
        asked = [*map(names_of, out_sharding)]
        asked += [()] * (before + len(free) + contract_rows * len(blocked) - len(asked))
        # Of the free axes of the weight, which are merged, the first may be split.
        stored = [*columns, *blocked] if contract_rows else rows
        place = last if contract_rows else num_batch
        of_first, first = (), 1
        if stored and not (contract_rows and padding):
            of_first = asked[before + sorted(stored).index(stored[0])]
            first = sizes[stored[0]]
        of_sum = names[num_batch:last] if contract_rows else names[last:]
        plan, scattered = plan_asked(
            mesh,
            [*asked[num_batch:before], of_first],
            [*kept[num_batch:], names[place] if stored else ()],
            [*free_shape, first],
            {name for of in names for name in of},
            {name for of in of_sum for name in of},
        )
        for i, more in enumerate(scattered[:-1], num_batch):
            kept[i], seen[i] = (*kept[i], *more), seen[i] * parts_of(mesh, more)
        if more := scattered[-1]:
            names[place] = *names[place], *more
            parts[place] *= parts_of(mesh, more)
    of_rows, of_columns = parts[num_batch:last], parts[last:]
    inner = [1] * (len(blocked) - 1)
    size = math.prod(sizes[axis] for axis in blocked)
    if contract_rows:
        x = merge(x, [*stack, len(x_free), len(rows)], [*seen, *of_rows])
    else:
        alone = [1] * (before + len(columns))
        x = merge(x, [*alone, len(blocked)], [*seen, *of_columns, *inner])
        if padding:
            x = jnp.pad(x, [*((0, 0) for _ in alone), (0, padding)])
        x = merge(x, [*stack, len(x_free), len(columns) + 1], [*seen, *of_columns])
    if isinstance(scales, ShortScales):
        both = scales, offsets
        both, plan = all_gather_scales(both, plan, x, 1 if batch else 0)
        scales, offsets = both
    if plan is not None and mesh is None:
        order_of_codes = *order, len(order)
        moved = [q.codes.shape[i] for i in order_of_codes]
        merged = component(q.codes).shape
        plan = plan.permuted(order_of_codes).reshaped(moved, merged)

    dtype = out_dtype
    if offsets is not None:
        dtype = jnp.promote_types(out_dtype, jnp.float32)
    out = quantized_dot(
        x,
        component(q.codes),
        component(float_scales(scales)),
        format=q.format,
        contract_rows=contract_rows,
        compute=q.compute.updated(precision=precision),
        weight_dtype=q.dtype,
        out_dtype=dtype,
        plan=plan,
    )
    if offsets is not None:
        if q.rounds_activations:
            x = straight_rounded(x, (x.ndim - 1,))
        offsets = component(float_scales(offsets))
        term = _offset_term(x.astype(dtype), offsets, contract_rows, out)
        out = (out + term).astype(out_dtype)

    shapes = [[sizes[axis] for axis in batch_axes]] if batch else []
    shapes.append(free_shape)
    if not contract_rows:
        kept += names[num_batch:last]
        shapes.append([sizes[axis] for axis in rows])
        return split_as(split(out, shapes, [*seen, *of_rows], kept), out_sharding)
    kept += names[last:]
    stored = [*(sizes[axis] for axis in columns), size + padding]
    out = split(out, [*shapes, stored], [*seen, *of_columns], kept)
    if padding:
        out = out[..., :size]
    shapes = [*([n] for n in out.shape[:-1]), [sizes[axis] for axis in blocked]]
    kept += [()] * len(inner)
    out = split(out, shapes, [*seen, *of_columns, *inner], kept)
    stored = [*columns, *blocked]
    logical = [before + stored.index(axis) for axis in sorted(stored)]
    out = jnp.transpose(out, (*range(before), *logical))
    return split_as(out, out_sharding)


def _offset_term(
    x: Float[Array, "*batch m size"],
    offsets: Float[Array, "*batch rows blocks"],
    contract_rows: bool,
    out: Float[Array, "*batch m out"],
) -> Float[Array, "*batch m out"]:
    """What the offsets of a weight add to a product `out`: an offset is the same for
    all of a block, so that of the activation only the sum matters."""
    blocks = offsets.shape[-1]
    offsets = offsets.astype(x.dtype)
    if not contract_rows:
        x = jnp.sum(x.reshape(*x.shape[:-1], blocks, x.shape[-1] // max(blocks, 1)), -1)
    stack, last = tuple(range(x.ndim - 2)), x.ndim - 1
    numbers = ((last,), (last - contract_rows,)), (stack, stack)
    how: dict[str, Any] = {"precision": lax.Precision.HIGHEST}
    spec = None if (mesh := explicit_mesh_of(out)) is None else spec_of(out)
    if spec is not None:
        even = not contract_rows or blocks % parts_of(mesh, spec[-1]) == 0
        how["out_sharding"] = PartitionSpec(*spec[:-1], spec[-1] if even else None)
    term = dense_dot(x, offsets, numbers, **how)
    if contract_rows:
        each = out.shape[-1] // max(blocks, 1)
        term = jnp.broadcast_to(term[..., None], (*term.shape, each))
        term = term.reshape(out.shape)
    return term if spec is None else split_as(term, PartitionSpec(*spec))
