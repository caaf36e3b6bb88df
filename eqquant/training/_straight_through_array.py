"""Quantized arrays with straight-through gradients."""

import dataclasses
import functools as ft
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Shaped

from ..arrays import (
    ArrayOperators,
    contract,
    Contraction,
    QuantizedArray,
    scaled,
    stored,
)
from ..primitives import straight_rounded


@stored
class StraightThroughArray(ArrayOperators):
    """A quantized array and its master weights.

    Values and products use `q`. Derivatives pass straight through to `master`. The
    array has the operators of `q`.

    **Fields:**

    - `master`: the floating-point weights, which receive the derivative.
    - `q`: the quantized weights, without a derivative.
    """

    part_types: ClassVar[Mapping[str, tuple[type, ...]]] = {"q": (QuantizedArray,)}

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

    def problems(self) -> Iterator[str | Exception]:
        yield from super().problems()
        shape, master = self.q.shape, self.master
        if master.shape != shape or not jnp.issubdtype(master.dtype, jnp.floating):
            yield f"master must be floating point of the shape {shape}, got {master}."

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
        return StraightThroughArray(scaled(self.dequantize(), factor, fn), q)

    #
    # Products
    #

    @property
    def rounds_activations(self) -> bool:
        return self.q.rounds_activations

    def contract(self, x, contraction: Contraction) -> Any:
        out_dtype = contraction.result_dtype(self, x)
        contraction = dataclasses.replace(contraction, out_dtype=out_dtype)
        multiply = lambda weight, x: contract(weight, x, contraction)
        out = multiply(self.q, lax.stop_gradient(x))
        if out is NotImplemented:
            return NotImplemented
        axes = tuple(axis for _, axis in contraction.over)
        return _product(out, x, self.master, self.q, multiply, axes)


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
def _product(out, x, master, q, multiply, axes):
    """Return `out`, the product of `q` and `x`, with the derivative of the dense
    product.

    `multiply(weight, x)` is the product, and `axes` are the contracted axes of `x`.
    """
    return out


@ft.partial(_product.defjvp, symbolic_zeros=True)
def _(multiply, axes, primals, tangents):
    _, x, master, q = primals
    _, x_dot, master_dot, _ = tangents
    terms = []
    if not isinstance(x_dot, SymbolicZero):
        weight = StraightThroughArray(master, q).dequantize()
        terms.append(multiply(weight, x_dot))
    if not isinstance(master_dot, SymbolicZero):
        rounded = straight_rounded(x, axes) if q.rounds_activations else x
        terms.append(multiply(master_dot, rounded))
    out = _product(*primals, multiply, axes)
    return out, sum(terms) if terms else jnp.zeros_like(out)
