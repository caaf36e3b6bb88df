"""Convolutions: products with the patches of the input."""

import dataclasses
import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...arrays import contract, Contraction, ImplicitArray, with_shape
from ._patches import patches_of
from ._products import rounded
from ._registry import Decoded, rule_for


@rule_for(lax.conv_general_dilated_p)
def _conv_general_dilated(
    lhs,
    rhs,
    *,
    window_strides,
    padding,
    lhs_dilation,
    rhs_dilation,
    dimension_numbers,
    feature_group_count,
    batch_group_count,
    precision,
    preferred_element_type,
):
    convolution = _Convolution(
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        feature_group_count,
        batch_group_count,
        precision,
        # Never None, which NumPy and a cache of programs take for float64.
        preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype),
    )
    try:
        return _convolution_program(lhs, rhs, convolution)
    except _NoProduct:
        return convolution(lhs, rhs)


class _NoProduct(Exception):
    """A result that no compiled program can return."""


# Compiled as one program, even in eager calls.
@ft.partial(jax.jit, static_argnums=2, inline=True)
def _convolution_program(lhs, rhs, convolution):
    out = convolution(lhs, rhs)
    if out is NotImplemented or isinstance(out, Decoded):
        raise _NoProduct
    return out


@dataclasses.dataclass(frozen=True)
class _Convolution:
    """The parameters of `lax.conv_general_dilated_p`, and the dtype of the result."""

    window_strides: Any
    padding: Any
    lhs_dilation: Any
    rhs_dilation: Any
    dimension_numbers: Any
    feature_group_count: int
    batch_group_count: int
    precision: Any
    out_dtype: Any

    def __call__(self, lhs, rhs):
        """Compute a convolution as a product with the patches of its input."""
        if isinstance(lhs, ImplicitArray) or self.batch_group_count != 1:
            return NotImplemented
        numbers = self.dimension_numbers
        x = jnp.transpose(lhs, numbers.lhs_spec)  # (batch, in, *space)
        shape = [rhs.shape[axis] for axis in numbers.rhs_spec]
        out_features, _, *window = shape  # (out, in / groups, *window)
        if len(window) > 6 or 0 in shape or 0 in x.shape:
            return NotImplemented
        groups = self.feature_group_count
        # The dilated and padded input.
        around = zip(self.padding, self.lhs_dilation, strict=True)
        config = [(0, 0, 0)] * 2 + [(low, high, d - 1) for (low, high), d in around]
        x = lax.pad(x, jnp.zeros((), x.dtype), config)
        patches = patches_of(x, window, self.window_strides, self.rhs_dilation)
        batch, features, *_ = patches.shape
        out_space = patches.shape[2 + len(window) :]
        lead = (batch, groups, features // groups, *window)
        patches = patches.reshape(*lead, math.prod(out_space))
        patches = jnp.moveaxis(patches, 1, 0)  # (groups, batch, in, *window, space)
        over = [(axis, axis) for axis in range(2, 3 + len(window))]
        inverse = [numbers.out_spec.index(axis) for axis in range(x.ndim)]

        def multiply(w, patches):
            w = w.transpose(numbers.rhs_spec)
            options = self.precision, self.out_dtype
            if groups == 1:
                pairs = [(i - 1, j - 1) for i, j in over]
                out = contract(w, patches[0], Contraction(pairs, (), *options))
            else:
                w = with_shape(w, (groups, out_features // groups, *shape[1:]))
                if w is NotImplemented:
                    return NotImplemented
                out = contract(w, patches, Contraction(over, [(0, 0)], *options))
            if out is NotImplemented:
                return NotImplemented
            if groups > 1:  # (groups, batch, space, out / groups)
                out = jnp.moveaxis(out, 0, 2).reshape(batch, -1, out_features)
            out = jnp.moveaxis(out, -1, 1).reshape(batch, out_features, *out_space)
            return jnp.transpose(out, inverse)

        out = multiply(rhs, patches)
        if out is NotImplemented:
            patches, is_rounded = rounded(rhs, patches, [axis for _, axis in over])
            if is_rounded:
                return Decoded(rhs, lambda w: multiply(w, patches))
        return out
