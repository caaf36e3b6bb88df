"""The five ways to multiply, and which one a product gets.

Errors are relative (Frobenius norm), on normal activations and weights of 4096 columns:

- `"float"`: the tile in float32 (float64), multiplied as such. 6e-7: rounding.
- `"split"`: for weights with integer levels and one scale per row. The activation is
  split in `high + low / 254`, both int8, which keeps 15 bits of it; the weight is
  exact. 4e-5.
- `"bfloat16"`: both rounded to bfloat16. 3e-3.
- `"round"`: the activation is rounded to int8, with a scale per row; so is each row of
  the weight, unless it is made of integers anyway. 1e-2 (1.3e-2 where it is rounded).
- `"int8"`: for an activation that is int8 already. Exact, but for the result.
"""

from typing import Literal

import jax.numpy as jnp

from ...formats import Format
from .._compute import Compute, Precision
from .._int8 import rounding


Recipe = Literal["float", "split", "bfloat16", "round", "int8"]
# The longest sum of products of int8 that int32 holds.
longest_int8_sum = (2**31 - 1) // 127**2


def choose_recipe(
    format: Format,
    precision: Precision,
    *,
    rows: int,
    size: int,
    blocks: int,
    contract_rows: bool,
    dtypes: tuple,
) -> Recipe:
    """How to multiply `rows` rows of an activation, contracting `size` elements, with a
    weight of so many `blocks` to the row. `dtypes` are those of the two."""
    int8_sums = size <= longest_int8_sum
    exact_in_int8 = format.integer_levels and blocks == 1
    if dtypes[0] == jnp.int8 and exact_in_int8 and int8_sums and not contract_rows:
        return "int8"
    if all(dtype == jnp.bfloat16 for dtype in dtypes):
        return "bfloat16"  # The dense product rounds the same operands.
    if precision == "highest" or jnp.dtype("float64") in dtypes:
        return "float"
    if precision == "high":
        # Two int8 products for one of floats, but twice the rows to make and to add up.
        few = rows <= 2048
        return "split" if exact_in_int8 and int8_sums and few else "float"
    # For many rows bfloat16 is as fast and more accurate, unless the codes are int8.
    codes_as_they_are = exact_in_int8 and format.bits == 8
    few_or_free = rows <= 128 or codes_as_they_are
    return "round" if int8_sums and few_or_free else "bfloat16"


def recipe_of(
    x,
    codes,
    scales,
    *,
    format: Format,
    contract_rows: bool,
    compute: Compute,
    weight_dtype,
    **_,
) -> Recipe:
    """That of a product, by the shapes and dtypes of what it gets."""
    return choose_recipe(
        format,
        compute.precision,
        rows=x.shape[-2],
        size=x.shape[-1],
        blocks=scales.shape[-1],
        contract_rows=contract_rows,
        dtypes=(jnp.dtype(x.dtype), jnp.dtype(weight_dtype)),
    )


def describe(x, codes, scales, **params) -> str:
    """The recipe that a product gets, in words, and how it rounds activations."""
    recipe = recipe_of(x, codes, scales, **params)
    bits = {"split": 15, "round": 8, "bfloat16": 8}.get(recipe)
    if recipe == "bfloat16" and x.dtype == jnp.bfloat16:
        bits = None
    return f"XLA, recipe {recipe!r} {rounding(x, bits)}"
