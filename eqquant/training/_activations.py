"""Activations in int8, while training."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

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
    return _round(x, axis)


@ft.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _round(x, axis):
    rows = jnp.moveaxis(x, axis, -1)
    if not rows.size:
        return x
    rounded, unit = round_int8(rows.astype(jnp.float32))
    return jnp.moveaxis((rounded * unit).astype(x.dtype), -1, axis)


@_round.defjvp
def _(axis, primals, tangents):
    return _round(*primals, axis), *tangents


class RoundingWeight(eqx.Module):
    """A weight in floating point whose products round the activation first.

    It stands where a quantized array with `activations="int8"` will stand, and has the
    operators that that has. As there, a `jax.numpy` function raises a `TypeError`.
    """

    array: Float[Array, "..."]

    # NumPy arrays leave `x @ w` to us.
    __array_ufunc__ = None

    def __array__(self, *args, **kwargs):
        raise TypeError(
            "A weight whose products round activations does not turn into an array by "
            "itself: multiply with `@`, or choose activations='float' for it."
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def size(self) -> int:
        return self.array.size

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def T(self) -> "RoundingWeight":
        return RoundingWeight(self.array.T)

    @property
    def mT(self) -> "RoundingWeight":
        return RoundingWeight(self.array.mT)

    def transpose(self, *axes) -> "RoundingWeight":
        return RoundingWeight(self.array.transpose(*axes))

    def reshape(self, *shape) -> "RoundingWeight":
        return RoundingWeight(self.array.reshape(*shape))

    def astype(self, dtype) -> "RoundingWeight":
        return RoundingWeight(self.array.astype(dtype))

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index) -> "RoundingWeight | Shaped[Array, '...']":
        """Rows of a matrix are what an embedding looks up, and are plain arrays."""
        out = self.array[index]
        return RoundingWeight(out) if out.ndim > 1 else out

    def __matmul__(self, x):
        if not eqx.is_array(x) and not isinstance(x, np.ndarray):
            return NotImplemented
        return self.array @ round_activations(x, axis=max(x.ndim - 2, 0))

    def __rmatmul__(self, x):
        if not eqx.is_array(x) and not isinstance(x, np.ndarray):
            return NotImplemented
        return round_activations(x) @ self.array
