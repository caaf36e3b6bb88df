"""A product with a quantized weight, in plain XLA.

A tile of rows of the weight is decoded at a time, so that the weight never exists in
full in floating point. The steps are optimised for XLA:CPU:

- A tile is decoded one iteration before it is used, with `_jax/_pipeline.py`. So XLA
  writes the tile in a vectorised loop. Otherwise it decodes each element repeatedly
  inside of the product.
- Codes stay in plane order, as in `formats/_pack.py`, and the activation is permuted.
"""

import functools as ft
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8, UInt8

from ..._jax import wide_dtype
from ...formats import Format, from_plane_order, to_plane_order
from .._int8 import lift_tiny_rows, round_int8, split_int8
from .._product import Product
from ._tiles import decode_tile, tiled


def dot(
    recipe: str,
    product: Product,
    x: Float[Array, "*batch m size"] | Int8[Array, "*batch m size"],
    codes: UInt8[Array, "*batch rows packed"] | Int8[Array, "*batch rows packed"],
    scales: Float[Array, "*batch rows blocks"],
    x_unit: Float[Array, "*batch m 1"] | None = None,
) -> Float[Array, "*batch m out"]:
    """Compute `x @ w.T`, or with `contract_rows` `x @ w`, for the weight `w` of shape
    `(rows, columns)`. An int8 activation stands for its integers times `x_unit`."""
    if product.is_empty:
        return jnp.zeros((*x.shape[:-1], product.free), product.out_dtype)
    out_dtype = product.out_dtype
    if x_unit is not None:
        out_dtype = wide_dtype(out_dtype)
    dot = ft.partial(_dot, recipe, product, out_dtype)
    for size in reversed(product.batch):
        dot = _over_one(dot) if size == 1 else _in_turn(dot)
    out = dot(x, codes, scales)
    return out if x_unit is None else (out * x_unit).astype(product.out_dtype)


def _over_one(dot: Callable) -> Callable:
    return lambda x, codes, scales: dot(x[0], codes[0], scales[0])[None]


def _in_turn(dot: Callable) -> Callable:
    # Sequentially, so that only one tile of one weight is decoded at a time.
    return lambda *args: lax.map(lambda args: dot(*args), args)


def _dot(recipe, product, out_dtype, x, codes, scales):
    format, contract_rows = product.format, product.contract_rows
    if not contract_rows:
        x = to_plane_order(x, format.bits, format.plane_group)
    if recipe in ("split", "round", "int8"):
        out = _integer_dot(x, codes, scales, format, contract_rows, recipe)
    else:
        wide = wide_dtype(product.weight_dtype)
        if x.dtype != jnp.int8:
            wide = jnp.promote_types(x.dtype, wide)
        operand = jnp.bfloat16 if recipe == "bfloat16" else wide
        out = _float_dot(x, codes, scales, format, contract_rows, wide, operand)
    if contract_rows:
        out = from_plane_order(out, format.bits, format.plane_group)
    return out.astype(out_dtype)


def _float_dot(x, codes, scales, format, contract_rows, compute, operand):
    rows = x.shape[0]
    x = x.astype(operand)

    def decode(codes, scales):
        tile = decode_tile(codes, scales, format, compute)
        return _to_bfloat16(tile) if operand == jnp.bfloat16 else tile

    multiply = ft.partial(_multiply, contract_rows=contract_rows, dtype=compute)
    if rows == 1 and operand == jnp.bfloat16:
        # XLA:CPU upcasts a whole bfloat16 matrix to multiply it by one vector.
        x = jnp.pad(x, ((0, 1), (0, 0)))
    elif rows == 1 and not contract_rows:
        # XLA:CPU transposes a whole matrix to multiply it by one vector.
        multiply = lambda x, tile: lax.dot(tile, x[0])[None]
    return tiled(x, codes, scales, decode, multiply, contract_rows, compute)[:rows]


def _integer_dot(x, codes, scales, format, contract_rows, recipe):
    rows = x.shape[0]
    scales = scales.astype(jnp.float32)
    exact = format.integer_levels and scales.shape[1] == 1
    # A weight is an int8 value, divided by `steps`, times the scale of its row. Divided
    # scales, and their reciprocals, might not be normal numbers.
    row_scale, steps = scales[:, 0], 1
    if not exact:
        row_scale, steps = jnp.max(jnp.abs(scales), 1), _int8_max(format)
    row_scale = row_scale[None]

    def decode(codes, scales):
        if exact:
            return format.levels(format.states(codes), jnp.int8)
        most = jnp.max(jnp.abs(scales), 1, keepdims=True)
        # XLA could compute `steps / most`, which overflows, if this divided by `most`.
        down = 1 / jnp.minimum(_power_of_two(most), 2.0**126)
        shares = scales * down * (steps / (most * down))
        shares = jnp.where(jnp.isfinite(shares), shares, 0)
        return _round(decode_tile(codes, shares, format, jnp.float32))

    multiply = ft.partial(_multiply, contract_rows=contract_rows, dtype=jnp.int32)
    if recipe == "int8":
        x_unit = down = jnp.ones((rows, 1), jnp.float32)
    else:
        x, down = lift_tiny_rows(x.astype(jnp.float32))
        if contract_rows:
            # Products of small activations and small scales would be zero.
            unit = _power_of_two(jnp.max(jnp.abs(row_scale)))
            x, row_scale = x * (row_scale / unit), unit
        x, x_unit = split_int8(x) if recipe == "split" else round_int8(x)
    if x.shape[0] == 1:  # XLA:CPU is slow at int8 matrix-vector products.
        x = jnp.pad(x, ((0, 1), (0, 0)))
    if exact and format.bits == 8 and not contract_rows:
        # The codes are the int8 operand. Products that contract rows are tiled anyway,
        # because XLA:CPU is slow for a whole matrix.
        out = multiply(x, codes)
    else:
        out = tiled(x, codes, scales, decode, multiply, contract_rows, jnp.int32)

    out, low = out[:rows].astype(jnp.float32) * (1 / steps), out[rows:]
    if recipe == "split":
        out = out + low.astype(jnp.float32) * (1 / 254 / steps)
    # In this order, intermediate values overflow and underflow only if the result does.
    last = jnp.maximum(x_unit, 1) * down
    return out * jnp.minimum(x_unit, 1) * row_scale * last


def _multiply(x, tile, *, contract_rows, dtype):
    return lax.dot_general(
        x,
        tile,
        (((1,), (0 if contract_rows else 1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )


def _power_of_two(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Round a magnitude down to a power of two, which is at least the smallest normal
    number."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(0x7F800000)
    return lax.bitcast_convert_type(jnp.maximum(bits, 0x00800000), jnp.float32)


def _int8_max(format: Format) -> float:
    """Return 127 divided by the largest level."""
    return 127 / format.largest_level


def _round(x: Float[Array, "*shape"]) -> Int8[Array, "*shape"]:
    # Adding 1.5 * 2**23 leaves the rounded integer in the lowest bits. That is much
    # faster than a conversion, which also handles values out of range.
    magic = x + jnp.float32(1.5 * 2**23)
    return lax.bitcast_convert_type(magic, jnp.int32).astype(jnp.int8)


def _to_bfloat16(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    # Ties round up instead of to even. NaNs need no check, because weights are finite.
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits = (bits + jnp.uint32(0x8000)) >> jnp.uint32(16)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
