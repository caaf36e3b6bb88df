"""Quantized arrays with straight-through gradients."""

import functools as ft
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Shaped

from ..primitives import straight_rounded
from . import _plain as plain
from ._operators import ArrayOperators
from .quantized import QuantizedArray


class StraightThroughArray(ArrayOperators):
    """A quantized array and its master weights.

    Values and products use `q`. Derivatives pass straight through to `master`. The
    array has the operators of `q`.

    **Fields:**

    - `master`: the floating-point weights, which receive the derivative.
    - `q`: the quantized weights, without a derivative.
    """

    master: Float[Array, "..."]
    q: QuantizedArray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.master.shape

    @property
    def dtype(self) -> np.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.q.dtype

    @property
    def is_whole(self) -> bool:
        return hasattr(self.master, "shape") and self.q.is_whole

    def dequantize(self) -> Float[Array, "..."]:
        return straight_through_value(self.q.dequantize(), self.master)

    #
    # Structure
    #

    @property
    def blocked_axes(self) -> tuple[int, ...]:
        return self.q.blocked_axes

    @property
    def whole_axes(self) -> int | None:
        return self.q.whole_axes

    def axes_of_parts(self, ndim: int, groups: Mapping[str, Sequence[int]]) -> Any:
        return {"q": tuple(range(ndim)), "master": tuple(range(ndim))}

    def with_dtype(self, dtype) -> "StraightThroughArray":
        q: Any = self.q.with_dtype(dtype)
        return StraightThroughArray(self.master.astype(dtype), q)

    def scale_parts(self, factor: Shaped[Array, "..."], fn) -> Any:
        q = self.q.scale_parts(lax.stop_gradient(factor), fn)
        if q is NotImplemented:
            return NotImplemented
        # The derivative with respect to the factor uses the rounded array.
        return StraightThroughArray(plain.scaled(self.dequantize(), factor, fn), q)

    #
    # Products
    #

    @property
    def rounds_activations(self) -> bool:
        return self.q.rounds_activations

    def contract(
        self,
        x,
        over: Sequence[tuple[int, int]],
        batch: Sequence[tuple[int, int]] = (),
        *,
        out_dtype=None,
        **how,
    ) -> Any:
        if out_dtype is None:
            out_dtype = jnp.promote_types(x.dtype, self.dtype)
        how |= {"over": over, "batch": batch, "out_dtype": out_dtype}
        contract = ft.partial(plain.contract, **how)
        out = contract(self.q, lax.stop_gradient(x))
        if out is NotImplemented:
            return NotImplemented
        axes = tuple(axis for _, axis in over)
        return _product(out, x, self.master, self.q, contract, axes)


@jax.custom_jvp
def straight_through_value(value, master):
    """Return `value`, with the derivative of `master`."""
    return value


@straight_through_value.defjvp
def _(primals, tangents):
    # The call is recursive, here and below, to support higher derivatives.
    _, master_dot = tangents
    return straight_through_value(*primals), master_dot


@ft.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _product(out, x, master, q, contract, axes):
    """Return `out`, the product of `q` and `x`, with the derivative of the dense
    product.

    `axes` are the contracted axes of `x`.
    """
    return out


@ft.partial(_product.defjvp, symbolic_zeros=True)
def _(contract, axes, primals, tangents):
    _, x, master, q = primals
    _, x_dot, master_dot, _ = tangents
    terms = []
    if not isinstance(x_dot, SymbolicZero):
        weight = StraightThroughArray(master, q).dequantize()
        terms.append(contract(weight, x_dot))
    if not isinstance(master_dot, SymbolicZero):
        seen = straight_rounded(x, axes) if q.rounds_activations else x
        terms.append(contract(master_dot, seen))
    out = _product(*primals, contract, axes)
    return out, sum(terms) if terms else jnp.zeros_like(out)
