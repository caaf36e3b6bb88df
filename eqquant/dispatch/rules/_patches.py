"""Patches: the input elements in each window of a convolution."""

import functools as ft
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped


def patches_of(
    x: Shaped[Array, "batch features *space"],
    window: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
) -> Shaped[Array, "batch features *both"]:
    """Return the patches of `x`, `(batch, features, *window, *positions)`."""
    how = tuple(tuple(map(int, numbers)) for numbers in (window, strides, dilation))
    places = [_places(n, *axis) for n, *axis in zip(x.shape[2:], *how, strict=True)]
    if 0 in places:  # JAX cannot batch the gradient of an empty lookup.
        return jnp.zeros((*x.shape[:2], *how[0], *places), x.dtype)
    if all(k == s and d == 1 for k, s, d in zip(*how, strict=True)):
        return _tiles(x, how[0])
    return lax.platform_dependent(
        x, cpu=ft.partial(_by_index, how=how), default=ft.partial(_by_lax, how=how)
    )


def _tiles(x, window):
    """Return the patches of windows that do not overlap, by a reshape."""
    batch, features, *space = x.shape
    places = [n // k for n, k in zip(space, window, strict=True)]
    limit = [n * k for n, k in zip(places, window, strict=True)]
    x = lax.slice(x, (0,) * x.ndim, (batch, features, *limit))
    pairs = zip(places, window, strict=True)
    x = x.reshape(batch, features, *(n for pair in pairs for n in pair))
    return _window_first(x, len(window))


def _window_first(x, count: int):
    """Transpose `(batch, features, positions, window, positions, window, ...)`."""
    windows, places = ([i + 2 * axis for axis in range(count)] for i in (3, 2))
    return jnp.transpose(x, (0, 1, *windows, *places))


# On XLA:CPU a gather is faster than a convolution with a one-hot kernel, and it
# compiles to one loop instead of four.
@ft.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _by_index(x, how):
    for axis, (k, stride, dilation) in enumerate(zip(*how, strict=True)):
        axis = 2 + 2 * axis
        places = _places(x.shape[axis], k, stride, dilation)
        index = stride * np.arange(places)[:, None] + dilation * np.arange(k)
        x = jnp.take(x, index, axis=axis, mode="clip")
    return _window_first(x, len(how[0]))


def _places(size: int, window: int, stride: int, dilation: int) -> int:
    return max(0, (size - (window - 1) * dilation - 1) // stride + 1)


@_by_index.defjvp
def _(how, primals, tangents):
    # The transpose of a gather is a sequential scatter-add.
    (x,), (x_dot,) = primals, tangents
    return _by_index(x, how), _by_shift(x_dot, how)


def _by_shift(x, how):
    """Return the patches by reshapes.

    An axis is copied once per window element, and cut into rows that are longer than
    the axis by the dilation. So each row starts one dilation later than the previous
    row.
    """
    count = len(how[0])
    for axis, (k, stride, dilation) in enumerate(zip(*how, strict=True)):
        axis = 2 + 2 * axis
        x = jnp.moveaxis(x, axis, -1)
        *lead, size = x.shape
        x = jnp.broadcast_to(x[..., None, :], (*lead, k, size))
        x = x.reshape(*lead, k * size)
        x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, k * dilation)])
        x = x.reshape(*lead, k, size + dilation)
        limit = _places(size, k, stride, dilation) * stride
        x = jnp.moveaxis(x[..., :limit:stride], (-1, -2), (axis, axis + 1))
    return _window_first(x, count)


def _by_lax(x, how):
    window, strides, dilation = how
    space = "DHWXYZ"[: len(window)]
    out = lax.conv_general_dilated_patches(
        x,
        window,
        strides,
        [(0, 0)] * len(window),
        rhs_dilation=dilation,
        dimension_numbers=("NC" + space, "OI" + space, "NC" + space),
        precision=lax.Precision.HIGHEST,  # The operation only copies.
    )
    batch, _, *places = out.shape
    return out.reshape(batch, x.shape[1], *window, *places)
