"""Products with quantized weights in plain XLA, for any platform.

The weight is decoded a tile of rows at a time, so that it never exists in full in
floating point. What each step looks like is dictated by XLA:CPU, the platform on which
it matters most:

- A tile is decoded one iteration before it is used (see `_pipeline`). That makes XLA
  write the tile with a vectorised loop, rather than decode each element over and over
  inside of the product.
- Codes stay in plane order (see `_pack`); the activation is permuted instead.

There are five recipes, and [`choose_recipe`][] chooses. Errors are relative (Frobenius
norm), on normal activations and weights of 4096 columns:

- `"float"`: the tile in float32 (float64), multiplied as such. 6e-7: rounding.
- `"split"`: for weights with integer levels and one scale per row. The activation is
  split in `high + low / 254`, both int8, which keeps 15 bits of it; the weight is
  exact. 4e-5.
- `"bfloat16"`: both rounded to bfloat16. 3e-3.
- `"round"`: the activation is rounded to int8, with a scale per row; so is each row of
  the weight, unless it is made of integers anyway. 1e-2 (1.3e-2 where it is rounded).
"""

import functools as ft
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8, Shaped, UInt8

from .._compat import match_varying
from .._int8 import round_int8 as round_int8, split_int8
from .._pack import from_plane_order, to_plane_order, unpack_planes
from .._pipeline import pipeline
from ..formats import Format, Precision


Recipe = Literal["float", "split", "bfloat16", "round", "int8"]

# Of a decoded tile: larger ones leave the caches, smaller ones keep threads waiting.
_tile_bytes = 2**22
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
    precision: Precision,
    weight_dtype,
    **_,
) -> Recipe:
    """That of a product, by the shapes and dtypes of what it gets."""
    return choose_recipe(
        format,
        precision,
        rows=x.shape[-2],
        size=x.shape[-1],
        blocks=scales.shape[-1],
        contract_rows=contract_rows,
        dtypes=(jnp.dtype(x.dtype), jnp.dtype(weight_dtype)),
    )


def dot(
    x: Float[Array, "*batch m size"] | Int8[Array, "*batch m size"],
    codes: UInt8[Array, "*batch rows packed"] | Int8[Array, "*batch rows packed"],
    scales: Float[Array, "*batch rows blocks"],
    *,
    format: Format,
    contract_rows: bool,
    precision: Precision,
    weight_dtype,
    out_dtype,
    x_unit: Float[Array, "*batch m 1"] | None = None,
) -> Float[Array, "*batch m out"]:
    """`x @ w.T`, or with `contract_rows` `x @ w`, for the weight `w` of shape
    `(rows, columns)` that `codes` and `scales` stand for. An activation in int8 is
    taken for the integers that it holds, times `x_unit`."""
    options: dict[str, Any] = dict(
        format=format,
        contract_rows=contract_rows,
        precision=precision,
        weight_dtype=weight_dtype,
    )
    if x_unit is not None:
        wide = jnp.promote_types(out_dtype, jnp.float32)
        out = dot(x, codes, scales, out_dtype=wide, **options)
        return (out * x_unit).astype(out_dtype)
    if codes.ndim > 2:
        one = ft.partial(dot, out_dtype=out_dtype, **options)
        if codes.shape[0] == 1:
            return one(x[0], codes[0], scales[0])[None]
        # One after the other: only one weight's tile is decoded at a time.
        return lax.map(lambda args: one(*args), (x, codes, scales))

    if 0 in (*x.shape, *codes.shape):
        columns = codes.shape[1] * 8 // format.bits
        free = columns if contract_rows else codes.shape[0]
        return jnp.zeros((x.shape[0], free), out_dtype)
    recipe = recipe_of(x, codes, scales, **options)
    if not contract_rows:
        x = to_plane_order(x, format.bits, format.group)
    if recipe in ("split", "round", "int8"):
        out = _integer_dot(x, codes, scales, format, contract_rows, recipe)
    else:
        compute = jnp.promote_types(x.dtype, weight_dtype)
        compute = jnp.promote_types(compute, jnp.float32)
        operand = jnp.bfloat16 if recipe == "bfloat16" else compute
        out = _float_dot(x, codes, scales, format, contract_rows, compute, operand)
    if contract_rows:
        out = from_plane_order(out, format.bits, format.group)
    return out.astype(out_dtype)


def _float_dot(x, codes, scales, format, contract_rows, compute, operand):
    rows = x.shape[0]
    x = x.astype(operand)

    def decode(codes, scales):
        tile = _decode(codes, scales, format, compute)
        return _to_bfloat16(tile) if operand == jnp.bfloat16 else tile

    multiply = ft.partial(_multiply, contract_rows=contract_rows, dtype=compute)
    if rows == 1 and operand == jnp.bfloat16:
        # XLA:CPU upcasts a whole bfloat16 matrix to multiply it by one vector.
        x = jnp.pad(x, ((0, 1), (0, 0)))
    elif rows == 1 and not contract_rows:
        # And it transposes a whole matrix to multiply one vector by it.
        multiply = lambda x, tile: lax.dot(tile, x[0])[None]
    return _tiled(x, codes, scales, decode, multiply, contract_rows, compute)[:rows]


def _integer_dot(x, codes, scales, format, contract_rows, recipe):
    rows = x.shape[0]
    scales = scales.astype(jnp.float32)
    exact = format.integer_levels and scales.shape[1] == 1
    # What an integer of a row of the weight is worth.
    unit = scales[:, 0] if exact else jnp.max(jnp.abs(scales), 1) / _int8_max(format)

    def decode(codes, scales):
        if exact:
            return format.levels(unpack_planes(codes, format.bits), jnp.int8)
        per_unit = _int8_max(format) / jnp.max(jnp.abs(scales), 1, keepdims=True)
        per_unit = jnp.where(jnp.isfinite(per_unit), per_unit, 0)
        return _round(_decode(codes, scales * per_unit, format, jnp.float32))

    multiply = ft.partial(_multiply, contract_rows=contract_rows, dtype=jnp.int32)
    if recipe == "int8":
        x_unit = jnp.ones((rows, 1), jnp.float32)
    else:
        x = x.astype(jnp.float32)
        to_int8 = split_int8 if recipe == "split" else round_int8
        x, x_unit = to_int8(x * unit if contract_rows else x)
    if x.shape[0] == 1:  # XLA:CPU is slow at int8 matrix-vector products.
        x, x_unit = (jnp.pad(a, ((0, 1), (0, 0))) for a in (x, x_unit))
    if exact and format.bits == 8 and not contract_rows:
        # The codes are the int8 operand. Contracting rows they are cut in tiles all the
        # same: XLA:CPU is slow at that with a whole matrix.
        out = multiply(x, codes)
    else:
        out = _tiled(x, codes, scales, decode, multiply, contract_rows, jnp.int32)
    out = out.astype(jnp.float32) * x_unit
    if not contract_rows:
        out = out * unit
    return out[:rows] + out[rows:] if recipe == "split" else out[:rows]


def _multiply(x, tile, *, contract_rows, dtype):
    return lax.dot_general(
        x,
        tile,
        (((1,), (0 if contract_rows else 1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )


def _int8_max(format: Format) -> int:
    """127 over the largest level of a format whose levels end at 1 or at 127."""
    return 1 if format.bits == 8 else 127


def _round(x: Float[Array, "*shape"]) -> Int8[Array, "*shape"]:
    # 1.5 * 2**23 leaves no bits for a fraction, and the rounded integer in the lowest
    # ones: much faster than a conversion, which has to care for what does not fit.
    magic = x + jnp.float32(1.5 * 2**23)
    return lax.bitcast_convert_type(magic, jnp.int32).astype(jnp.int8)


def _to_bfloat16(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    # Half rounds up instead of to even, and NaN is not looked for: a weight has none.
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits = (bits + jnp.uint32(0x8000)) >> jnp.uint32(16)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def _decode(
    codes: Shaped[Array, "rows packed"],
    scales: Float[Array, "rows blocks"],
    format: Format,
    dtype,
) -> Float[Array, "rows planes blocks bytes"]:
    """The weight in plane order. The result keeps its axes: a reshape here would be
    fused into the decoding, and stop XLA from vectorising it."""
    rows, packed = codes.shape
    blocks = scales.shape[-1]
    levels = format.levels(unpack_planes(codes, format.bits), dtype)
    levels = levels.reshape(rows, levels.shape[1], blocks, packed // blocks)
    return levels * scales.astype(dtype)[:, None, :, None]


def tile_rows(rows: int, row_bytes: int) -> int:
    """How many rows of the weight are decoded at once: never all of them."""
    most = max(8, _tile_bytes // max(row_bytes, 1) // 8 * 8)
    return max(1, min(most, -(-rows // 2)))


def _tiled(
    x: Shaped[Array, "m size"],
    codes: Shaped[Array, "rows packed"],
    scales: Float[Array, "rows blocks"],
    decode: Callable,
    use: Callable,
    contract_rows: bool,
    dtype,
) -> Shaped[Array, "m out"]:
    """The product, tile after tile. `decode(codes, scales)` makes a tile out of some
    rows; `use(x, tile)` multiplies with it."""
    rows, _ = codes.shape
    whole = jax.eval_shape(decode, codes, scales)
    columns = whole.size // rows
    height = tile_rows(rows, columns * whole.dtype.itemsize)
    count, rest = divmod(rows, height)
    m = x.shape[0]

    def rows_of(a, i, axis=0, size=height):
        return lax.dynamic_slice_in_dim(a, i * height, size, axis)

    def decoded(i, size=height):
        return decode(rows_of(codes, i, size=size), rows_of(scales, i, size=size))

    def add(i, tile, out, size=height):
        tile = tile.reshape(size, -1)
        if contract_rows:
            return out + use(rows_of(x, i, axis=1, size=size), tile)
        # Rows of the weight are rows of the result while it is put together: a tile's
        # results are then contiguous. For large m the transposition would cost more.
        if m <= 8:
            return lax.dynamic_update_slice_in_dim(out, use(x, tile).T, i * height, 0)
        return lax.dynamic_update_slice_in_dim(out, use(x, tile), i * height, 1)

    shape = (m, columns) if contract_rows else (rows, m) if m <= 8 else (m, rows)
    out, _, _, _ = match_varying(jnp.zeros(shape, dtype), x, codes, scales)

    out = pipeline(count, decoded, add, out)
    if rest:
        out = add(count, decoded(count, size=rest), out, size=rest)
    return out.T if not contract_rows and m <= 8 else out


def scale_gradient(
    ct: Float[Array, "*batch m rows"],
    x: Float[Array, "*batch m columns"],
    codes: Shaped[Array, "*batch rows packed"],
    blocks: int,
    *,
    format: Format,
    dtype,
) -> Float[Array, "*batch rows blocks"]:
    """The gradient of `sum(ct * (x @ w.T))` with respect to the scales of `w`.

    `sum_m ct[m, row] * sum_(k in block) x[m, k] * level[row, k]`: a tile of rows at a
    time, as the product itself.
    """
    if codes.ndim > 2:
        one = ft.partial(scale_gradient, blocks=blocks, format=format, dtype=dtype)
        return lax.map(lambda args: one(*args), (ct, x, codes))
    rows, packed = codes.shape
    compute = jnp.promote_types(dtype, jnp.float32)
    if 0 in (*codes.shape, *x.shape):
        return jnp.zeros((rows, blocks), dtype)
    x = to_plane_order(x, format.bits, format.group).astype(compute)
    ct = ct.astype(compute)
    height = tile_rows(rows, x.shape[-1] * x.dtype.itemsize)

    def one_tile(codes, ct):
        levels = format.levels(unpack_planes(codes, format.bits), compute)
        height, planes, _ = levels.shape
        weight_gradient = lax.dot_general(
            ct, x, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST
        )
        product = levels.reshape(height, -1) * weight_gradient
        product = product.reshape(height, planes, blocks, packed // blocks)
        return product.sum((1, 3)).astype(dtype)

    def step(i):
        return one_tile(
            lax.dynamic_slice_in_dim(codes, i * height, height, 0),
            lax.dynamic_slice_in_dim(ct, i * height, height, 1),
        )

    count, rest = divmod(rows, height)
    out = lax.map(step, jnp.arange(count)).reshape(count * height, blocks)
    if rest:
        out = jnp.concatenate([out, one_tile(codes[-rest:], ct[:, -rest:])])
    return out
