"""Activations in int8, while training."""

import functools as ft
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._int8 import round_int8
from .._typing import typed


@typed
def round_activations(
    x: Float[Array, "..."] | Float[np.ndarray, "..."], *, axis: int = -1
) -> Float[Array, "..."]:
    """Round activations to int8, with the gradient of the identity.

    Each row along `axis` (each token) has a scale of its own, `absmax / 127`: what a
    product with `activations="int8"` does to its activation, and W8A8 means by dynamic
    quantization per token.

    **Arguments:**

    - `x`: a floating-point array.
    - `axis`: the one that a product contracts.

    **Returns:**

    An array of the shape and dtype of `x`.
    """
    x = jnp.asarray(x)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"round_activations: axis must be between {-x.ndim} and {x.ndim - 1} for "
            f"an array of {x.ndim} axes, got {axis}."
        )
    return straight_rounded(x, (axis,))


@ft.partial(jax.custom_jvp, nondiff_argnums=(1,))
def straight_rounded(
    x: Float[Array, "..."], axes: Sequence[int]
) -> Float[Array, "..."]:
    """The same, with one scale for all along several axes."""
    if not x.size:
        return x
    last = range(-len(axes), 0)
    moved = jnp.moveaxis(x, axes, last)
    lead = moved.shape[: x.ndim - len(axes)]
    codes, unit = round_int8(moved.reshape(*lead, -1).astype(jnp.float32))
    out = (codes * unit).astype(x.dtype).reshape(moved.shape)
    return jnp.moveaxis(out, last, axes)


@straight_rounded.defjvp
def _(axes, primals, tangents):
    return straight_rounded(*primals, axes), *tangents
