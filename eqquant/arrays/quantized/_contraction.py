"""Contractions of a quantized array, each as one `quantized_dot`.

`_geometry.py` describes the axes. This file applies it to arrays.
"""

import dataclasses
import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from ..._jax import config
from ...formats import ShortScales
from ...kernels import Precision, View
from ...partition import merge, merge_moves, Parts, reshard_to, split
from .._contraction import Contraction
from .._partition import SplitProduct
from ._geometry import Geometry, geometry
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
        return "highest"  # A named dot algorithm: the only precision that honours all.
    if precision == lax.Precision.HIGHEST:
        return "highest"
    return "high" if precision == lax.Precision.HIGH else "default"


def contract(
    q: AbstractQuantizedArray, x: Shaped[Array, "..."], contraction: Contraction
):
    """Contract a quantized array with an activation, as `ImplicitArray.contract` does.

    Return NotImplemented if that would decode all of `q`.
    """
    out_dtype = contraction.result_dtype(q, x)
    if not jnp.issubdtype(out_dtype, jnp.floating):
        return NotImplemented
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.promote_types(x.dtype, q.dtype))

    x_axis_of = dict(contraction.over)
    blocked = q.blocked_axes
    batch_axes = [axis for axis, _ in contraction.batch]
    contracted_blocked = [axis for axis in blocked if axis in x_axis_of]
    if any(axis in blocked for axis in batch_axes):
        return NotImplemented
    if 0 < len(contracted_blocked) < len(blocked):
        q = q.unflatten()
        if q is NotImplemented:
            return NotImplemented
        return contract(q, x, contraction)

    precision = as_precision(contraction.precision)
    contraction = dataclasses.replace(
        contraction, precision=precision, out_dtype=jnp.dtype(out_dtype)
    )
    return _contract(q, q.stack_view, x, contraction)


def _merged(view: View | None, g: Geometry, product: SplitProduct) -> View | None:
    """Return a view whose matrices have the axes of the merged codes; None if that
    would move elements of the stack."""
    in_order = list(g.weight_order) == sorted(g.weight_order)
    if view is None or g.columns or not in_order:
        return None
    index, n, counts = view.index, view.index.ndim, g.weight_counts
    if n:  # Each product of a batch has its own matrix.
        if n != len(g.stack):
            return None
        index, counts = index.reshape(-1), counts[1:]
    axes = [1, *counts], Parts.whole(1) + product.weight[n:]
    if merge_moves(view.codes, *axes):
        return None
    stacks = view.codes, view.scales, view.offsets
    return View(index, *jax.tree.map(lambda a: merge(a, *axes), stacks))


# One program, also if it is called eagerly.
@ft.partial(jax.jit, static_argnums=3, inline=True)
def _contract(
    q: AbstractQuantizedArray,
    view: View | None,
    x: Float[Array, "..."],
    contraction: Contraction,
) -> Float[Array, "..."]:
    over, batch = contraction.over, contraction.batch
    g = geometry(q.shape, x.shape, q.blocked_axes, over, batch, q.padding)
    codes = jnp.transpose(q.codes, g.weight_order)
    x = jnp.transpose(x, g.x_order)
    product = q.split_product(g, codes, x, contraction.out_sharding)

    def component(a):
        return merge(jnp.transpose(a, g.weight_order), g.weight_counts, product.weight)

    x = _merge_activation(x, g, product)
    scales, offsets = q.scales, q.offsets
    if g.weight_counts[-1] > 1:  # Joined rows have several outer scales.
        scales, offsets = q.float_parts
    if isinstance(scales, ShortScales):
        stack = 1 if batch else 0
        (scales, offsets), product = product.gather((scales, offsets), x, stack)

    codes = component(q.codes)
    out = product.dot(
        g,
        x,
        codes,
        jax.tree.map(component, scales),
        offsets=jax.tree.map(component, offsets),
        format=q.format,
        contract_rows=g.contract_rows,
        compute=q.compute.updated(precision=contraction.precision),
        weight_dtype=q.dtype,
        out_dtype=contraction.out_dtype,
        view=_merged(view, g, product),
    )
    return reshard_to(_split_result(out, g, product), contraction.out_sharding)


def _merge_activation(
    x: Float[Array, "..."], g: Geometry, product: SplitProduct
) -> Float[Array, "*stack m size"]:
    """Merge the axes of a permuted activation, and pad it to whole blocks."""
    parts = product.lead + product.weight[g.contracted_axes]
    if not g.contract_rows:
        x = merge(x, g.blocked_counts, parts + Parts.whole(len(g.blocked) - 1))
        if g.padding:
            x = jnp.pad(x, g.x_padding)
    return merge(x, g.x_counts, parts)


def _split_result(
    out: Float[Array, "*stack m out"], g: Geometry, product: SplitProduct
) -> Float[Array, "..."]:
    """Split the axes of a product again, in the order of the array."""
    parts = product.lead + product.weight[g.free_axes]
    out = split(out, g.out_shapes, parts)
    if g.contract_rows:
        if g.padding:
            out = out[..., : g.size]
        out = split(out, g.blocked_shapes, parts + Parts.whole(len(g.blocked) - 1))
    return jnp.transpose(out, g.out_order)
