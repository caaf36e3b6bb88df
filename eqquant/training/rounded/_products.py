"""The three products with a weight: forward, and for both gradients.

All are products of two matrices, which are rounded along the contracted axis.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, UInt32

from ...primitives import codes_dot
from ._specs import BFloat16, Coded, NVFP4, Recipe, times


# The name of the codes that the backward pass needs, for checkpoint policies.
NAME = "eqquant.low_precision"


def flat(x: Float[Array, "..."], stack: int) -> Float[Array, "*stack tokens size"]:
    """Merge the tokens."""
    tokens = math.prod(x.shape[stack:-1])
    return x.reshape(*x.shape[:stack], tokens, x.shape[-1])


def encode(
    x: Float[Array, "*stack tokens size"],
    w: Float[Array, "*stack rows size"],
    recipe: Recipe,
    keep: bool,
) -> tuple[Coded, Coded, Coded | None, Coded | None]:
    """Return the codes of both operands of the forward product.

    With `keep`, also return codes for the backward products, or None where these use
    the codes of the forward product.
    """
    numbers, shape = recipe.numbers("forward"), w.shape[-2:]

    def seen(product, operand, numbers, x, coded, axis):
        return recipe.observe((shape, product, operand), numbers, x, coded, axis)

    of_x = seen("forward", "activation", numbers, x, numbers.encode(x, -1), -1)
    of_w = seen("forward", "weight", numbers, w, numbers.encode_weight(w), -1)
    if not keep:
        return of_x, of_w, None, None
    kept_x = kept_w = None
    if not keeps_forward(recipe, "wgrad"):
        wgrad = recipe.numbers("wgrad")
        other, spread = wgrad.other, wgrad.spread(x, -2)
        kept_x = other.encode(spread, -2)
        kept_x = seen("wgrad", "activation", other, spread, kept_x, -2)
    if not keeps_forward(recipe, "dgrad"):
        other = recipe.numbers("dgrad").other
        kept_w = seen("dgrad", "weight", other, w, other.encode(w, -2), -2)
    return of_x, of_w, kept_x, kept_w


def keeps_forward(recipe: Recipe, product: str) -> bool:
    """Return whether a backward product uses the codes of the forward product."""
    forward, back = recipe.numbers("forward"), recipe.numbers(product)
    if isinstance(forward, NVFP4):
        return product == "dgrad" and isinstance(back, NVFP4)
    if isinstance(back, BFloat16):
        return forward.has_row_scales or isinstance(forward, BFloat16)
    is_int8 = recipe.forward == "int8", getattr(recipe, product) == "int8"
    both = forward.has_row_scales and back.has_row_scales
    return both and is_int8[0] == is_int8[1]


def named(codes: Coded | None) -> Coded | None:
    """Name codes and scales for checkpoint policies."""
    return jax.tree.map(_named, codes)


def _named(x: Array) -> Array:
    if x.dtype.itemsize > 1 or x.dtype == jnp.int8:
        return checkpoint_name(x, NAME)
    # `jax.checkpoint` rounds floats that it saves by `lax.reduce_precision`, which has
    # no largest values of E4M3: these would become NaN.
    bits = checkpoint_name(lax.bitcast_convert_type(x, jnp.uint8), NAME)
    return lax.bitcast_convert_type(bits, x.dtype)


def forward(of_x: Coded, of_w: Coded, recipe: Recipe, out_dtype):
    """Return `x @ w.T`."""
    numbers = recipe.numbers("forward")
    x, x_unit = numbers.operand(of_x, -1)
    w, w_unit = numbers.operand(of_w, -1)
    return codes_dot(x, w, (-1, -1), (x_unit, w_unit), out_dtype)


def backward(
    g: Float[Array, "*stack tokens rows"],
    kept: Coded,
    recipe: Recipe,
    product: str,
    seed: UInt32[Array, "*stack 2"] | None,
    out_dtype: Any,
) -> Float[Array, "*stack free size"]:
    """Return `g @ w` ("dgrad") or `g.T @ x` ("wgrad")."""
    axis, shape = -1 if product == "dgrad" else -2, (g.shape[-1], kept.codes.shape[-1])
    numbers, unit, factor = recipe.numbers(product), None, None
    first = recipe.numbers("forward")
    if not keeps_forward(recipe, product):
        if product == "wgrad":
            g = numbers.spread(g, axis)
        values, unit = numbers.other.operand(kept, -2)
    elif numbers.has_row_scales:
        # The scales are along the contracted axis: the gradient takes them.
        scales = kept.scales
        assert scales is not None
        factor = scales if product == "wgrad" else jnp.swapaxes(scales, -1, -2)
        values = kept.codes
    elif isinstance(numbers, BFloat16):
        values = first.decode(kept, -1).astype(jnp.bfloat16)
    else:
        values, unit = first.operand(kept, -1)
    if isinstance(numbers, BFloat16):
        seed = None
    coded = numbers.encode(g, axis, seed, factor)
    label = shape, product, "gradient"
    recipe.observe(label, numbers, times(g, factor), coded, axis)
    g_values, g_unit = numbers.operand(coded, axis)
    return codes_dot(g_values, values, (axis, -2), (g_unit, unit), out_dtype)


def decoded(kept: Coded, recipe: Recipe, product: str, size: int):
    """Return the kept operand of a backward product in float32. `size` is the length of
    the contracted axis."""
    if keeps_forward(recipe, product):
        return recipe.numbers("forward").decode(kept, -1)
    numbers = recipe.numbers(product)
    values = numbers.other.decode(kept, -2)
    return numbers.gathered(values, -2, size) if product == "wgrad" else values
