"""Products with a low-rank adapter."""

import functools as ft
import math
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, Shaped

from ..._jax import has_explicit_axes
from ...partition import reshard_to
from ...primitives import rows_dot
from .. import _plain as plain
from .._contraction import Contraction
from .._implicit import is_implicit
from ._structure import AbstractLoraArray


# Each function is compiled as one program, even in eager calls.


@ft.partial(jax.jit, inline=True)
def add_adapter(w: AbstractLoraArray, base: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the floating-point sum of a decoded base and the adapter of `w`."""
    wide = jnp.promote_types(w.dtype, w.b.dtype)
    axes = w.factors
    spec = f"{_spell(axes['b'])},{_spell(axes['a'])}->{_spell(range(w.ndim))}"
    b, a = (x.dequantize() if is_implicit(x) else x for x in (w.b, w.a))
    product = jnp.einsum(spec, b, a, precision="highest", preferred_element_type=wide)
    return (base.astype(wide) + w.scale * product).astype(w.dtype)


@ft.partial(jax.jit, static_argnums=2, inline=True)
def contract_adapter(
    w: AbstractLoraArray, x: Shaped[Array, "..."], contraction: Contraction
) -> Float[Array, "..."]:
    """Contract with the adapter alone, without forming `scale * b @ a`."""
    over, batch = contraction.over, contraction.batch
    precision, out_sharding = contraction.precision, contraction.out_sharding
    x = x.astype(jnp.promote_types(x.dtype, w.b.dtype))
    x_axis_of = dict((*over, *batch))
    contracted = [axis for axis, _ in over]
    if w.key is not None:
        key, axes = _key_for(w, batch)
        x = _drop(x, key, axes, w.dropout)

    # Multiply `x` first by the factor that has the contracted axes.
    ins, outs = ([i + w.ndim for i in axes] for axes in (w.in_axes, w.out_axes))
    forwards = bool(set(ins) & set(contracted))
    factor_axes = ins if forwards else outs
    # Sharded axes, and axes of implicit arrays, are not merged.
    general = has_explicit_axes() or is_implicit(w.a)
    if not (w.lead_axes or batch or general) and set(contracted) == set(factor_axes):
        return _multiply_rows(
            w, x, [x_axis_of[i] for i in factor_axes], forwards, precision
        )
    axes = w.factors
    first, second = ("a", "b") if forwards else ("b", "a")
    w_axis_of = {i: axis for axis, i in x_axis_of.items()}
    free = iter(range(w.ndim, w.ndim + x.ndim))
    x_axes = [w_axis_of[i] if i in w_axis_of else next(free) for i in range(x.ndim)]
    x_free = [i for i in x_axes if i >= w.ndim]
    rest = [i for i in range(w.ndim) if i not in x_axis_of]
    out = [*(axis for axis, _ in batch), *x_free, *rest]
    met = [*x_axes, *(i for i in axes[first] if i not in x_axes)]
    between = [i for i in met if i in {*out, *axes[second], None}]

    def multiply(x, x_axes, name, out_axes):
        part = getattr(w, name)
        if general:
            return _contract(x, x_axes, part, axes[name], out_axes, precision)
        spec = f"{_spell(x_axes)},{_spell(axes[name])}->{_spell(out_axes)}"
        return jnp.einsum(spec, x, part, precision=precision)

    y = multiply(x, x_axes, first, between) * w.scale
    # Arrays with the rank as an axis are small, so reshard these.
    tokens = [out.index(i) if i in x_free else None for i in between]
    y = reshard_to(y, out_sharding, tokens)
    return reshard_to(multiply(y, between, second, out), out_sharding)


def _contract(x, x_axes, part, axes, out_axes, precision):
    """Return an `einsum` of two arrays, without merging axes of either."""
    shared = [i for i in x_axes if i in axes]
    over = [(axes.index(i), x_axes.index(i)) for i in shared if i not in out_axes]
    batch = [(axes.index(i), x_axes.index(i)) for i in shared if i in out_axes]
    out = plain.contract(part, x, Contraction(over, batch, precision))
    order = [i for i in shared if i in out_axes]
    order += [i for i in (*x_axes, *axes) if i not in shared]
    return jnp.transpose(out, [order.index(i) for i in out_axes])


def _multiply_rows(w: AbstractLoraArray, x, over: list[int], forwards: bool, precision):
    """Multiply each row of `x` by both matrices. This is the most frequent case."""
    free = [i for i in range(x.ndim) if i not in over]
    shape = [x.shape[i] for i in free]
    x = jnp.transpose(x, (*free, *over)).reshape(math.prod(shape), -1)
    a, b = w.a.reshape(w.rank, -1), w.b.reshape(-1, w.rank)
    first, second = (a, b) if forwards else (b.T, a.T)
    dtype = x.dtype
    y = rows_dot(x, first.astype(dtype), precision) * w.scale
    y = rows_dot(y, second.astype(dtype), precision)
    kept = w.out_axes if forwards else w.in_axes
    return y.reshape(*shape, *(w.shape[i] for i in kept))


def _key_for(
    w: AbstractLoraArray, batch: Sequence[tuple[int, int]]
) -> tuple[Any, list[int]]:
    """Return dropout keys and their axes in the activation.

    Matrices of a stack that multiply the same activation share its mask.
    """
    x_axis_of = dict(batch)
    if all(axis in x_axis_of for axis in w.lead_axes):
        return w.key, [x_axis_of[axis] for axis in w.lead_axes]
    assert w.key is not None
    return w.key.reshape(-1)[0], []


def _drop(
    x: Float[Array, "..."], keys: Key[Array, "..."], axes: Sequence[int], rate: float
) -> Float[Array, "..."]:
    """Set a share `rate` of the elements of `x` to zero, and scale up the others."""
    rest = [axis for axis in range(x.ndim) if axis not in axes]
    order = [*axes, *rest]
    draw = lambda key: jax.random.bernoulli(key, 1 - rate, [x.shape[i] for i in rest])
    for _ in axes:
        draw = jax.vmap(draw)
    kept = jnp.transpose(draw(keys), [order.index(axis) for axis in range(x.ndim)])
    return jnp.where(kept, x / (1 - rate), 0)


def _spell(axes) -> str:
    """Return the subscripts of axes for `einsum`."""
    return "".join("Z" if i is None else string.ascii_letters[i] for i in axes)
