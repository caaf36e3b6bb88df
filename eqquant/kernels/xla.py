"""Products with quantized weights in plain XLA, for any platform.

The weight is decoded a tile of rows at a time, so that it never exists in full in
floating point. What each step looks like is dictated by XLA:CPU, the platform on which
it matters most:

- A tile is decoded one iteration before it is used, and carried through the loop. That
  makes XLA write the tile with a vectorised loop, rather than decode each element over
  and over inside of the product.
- Codes stay in plane order (see `_pack`); the activation is permuted instead.
- Weights with integer levels and one scale per row are multiplied in int8: an
  activation is split in `high + low / 254`, both int8, which keeps 15 bits of it.
"""

import functools as ft
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8, Shaped, UInt8

from .._compat import match_varying
from .._pack import from_plane_order, to_plane_order, unpack_planes
from ..formats import Format, Precision


# Elements of a decoded tile: 2 MB in float32, what a core's cache holds.
_tile_elements = 2**19
# The longest sum of products of int8 that int32 holds.
_longest_int8_sum = (2**31 - 1) // 127**2


def dot(
    x: Float[Array, "*batch m size"],
    codes: UInt8[Array, "*batch rows packed"] | Int8[Array, "*batch rows packed"],
    scales: Float[Array, "*batch rows blocks"],
    *,
    format: Format,
    contract_rows: bool,
    precision: Precision,
    weight_dtype,
    out_dtype,
) -> Float[Array, "*batch m out"]:
    """`x @ w.T`, or with `contract_rows` `x @ w`, for the weight `w` of shape
    `(rows, columns)` that `codes` and `scales` stand for."""
    kwargs = dict(
        format=format,
        contract_rows=contract_rows,
        precision=precision,
        weight_dtype=weight_dtype,
        out_dtype=out_dtype,
    )
    if codes.ndim > 2:
        one = ft.partial(dot, **kwargs)
        if codes.shape[0] == 1:
            return one(x[0], codes[0], scales[0])[None]
        # One after the other: only one weight's tile is decoded at a time.
        return lax.map(lambda args: one(*args), (x, codes, scales))

    *_, packed = codes.shape
    planes = 8 // format.bits
    columns = packed * planes
    if not contract_rows:
        x = to_plane_order(x, format.bits, format.group)
    if 0 in (*x.shape, *codes.shape):
        out = jnp.zeros((x.shape[0], columns if contract_rows else codes.shape[0]))
        return out.astype(out_dtype)

    integer = (
        format.integer_levels
        and scales.shape[-1] == 1
        and precision != "highest"
        and x.shape[-1] <= _longest_int8_sum
        and jnp.dtype(x.dtype) != jnp.float64
        and jnp.dtype(out_dtype) != jnp.float64
    )
    multiply = _integer_dot if integer else _float_dot
    out = multiply(x, codes, scales, **kwargs)
    if contract_rows:
        out = from_plane_order(out, format.bits, format.group)
    return out.astype(out_dtype)


def _float_dot(
    x, codes, scales, *, format, contract_rows, precision, weight_dtype, out_dtype
):
    compute = jnp.promote_types(jnp.promote_types(x.dtype, weight_dtype), jnp.float32)
    # What the dense product does; or, on request, what the fastest one does.
    narrow = {jnp.dtype(x.dtype), jnp.dtype(weight_dtype)} == {jnp.dtype("bfloat16")}
    fast = precision == "default" and compute == jnp.float32
    operand = jnp.bfloat16 if narrow or fast else compute
    x = x.astype(operand)

    def decode(codes, scales):
        return _decode(codes, scales, format, compute).astype(operand)

    def use(x, tile):
        return lax.dot_general(
            x,
            tile.reshape(tile.shape[0], -1),
            (((1,), (0 if contract_rows else 1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=compute,
        )

    def matrix_vector(x, tile):
        tile = tile.reshape(tile.shape[0], -1)
        return lax.dot_general(tile, x[0], (((1,), (0,)), ((), ())))[None]

    rows = x.shape[0]
    if rows == 1:
        if operand == jnp.bfloat16:
            # XLA:CPU upcasts a whole bfloat16 matrix to multiply it by one vector.
            x = jnp.pad(x, ((0, 1), (0, 0)))
        elif not contract_rows:
            use = matrix_vector
    return _tiled(x, codes, scales, decode, use, contract_rows, compute)[:rows]


def _integer_dot(
    x, codes, scales, *, format, contract_rows, precision, weight_dtype, out_dtype
):
    del weight_dtype, out_dtype
    rows = x.shape[0]
    x = x.astype(jnp.float32)
    scales = scales[:, 0].astype(jnp.float32)
    if contract_rows:
        x = x * scales
    split = _split_int8 if precision == "high" else _round_int8
    x, unit = split(x)

    def decode(codes, scales):
        del scales
        return format.levels(unpack_planes(codes, format.bits), jnp.int8)

    def use(x, tile):
        return lax.dot_general(
            x,
            tile.reshape(tile.shape[0], -1),
            (((1,), (0 if contract_rows else 1,)), ((), ())),
            preferred_element_type=jnp.int32,
        )

    if format.bits == 8:
        out = use(x, codes)  # Codes are the int8 operand as they are.
    else:
        out = _tiled(x, codes, scales, decode, use, contract_rows, jnp.int32)
    out = out.astype(jnp.float32) * unit
    if not contract_rows:
        out = out * scales
    return out[:rows] + out[rows:] if precision == "high" else out[:rows]


def _row_unit(x: Float[Array, "m size"]) -> Float[Array, "m 1"]:
    # Through the bits: XLA:CPU's maximum of floats may lose a NaN, and a row with a NaN
    # has to stay one.
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(0x7FFFFFFF)
    absmax = lax.bitcast_convert_type(jnp.max(bits, -1, keepdims=True), jnp.float32)
    absmax = jnp.where(jnp.isfinite(absmax), absmax, jnp.nan)
    return jnp.where(absmax == 0, 1, absmax / 127)


def _split_int8(
    x: Float[Array, "m size"],
) -> tuple[Int8[Array, "m2 size"], Float[Array, "m2 1"]]:
    """`x` as two int8 matrices, one above the other: `high * unit + low * unit/254`."""
    unit = _row_unit(x)
    x = x / unit
    high = jnp.round(x)
    low = jnp.round((x - high) * 254)
    rows = jnp.concatenate([high, low]).astype(jnp.int8)
    return rows, jnp.concatenate([unit, unit / 254])


def _round_int8(x):
    unit = _row_unit(x)
    x = jnp.round(x / unit).astype(jnp.int8)
    if x.shape[0] == 1:  # XLA:CPU is slow at int8 matrix-vector products.
        x, unit = jnp.pad(x, ((0, 1), (0, 0))), jnp.pad(unit, ((0, 1), (0, 0)))
    return x, unit


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


def tile_rows(rows: int, columns: int) -> int:
    """How many rows of the weight are decoded at once: never all of them."""
    most = max(8, _tile_elements // max(columns, 1) // 8 * 8)
    return max(1, min(most, -(-rows // 2)))


def _tiled(
    x: Shaped[Array, "m size"],
    codes: Shaped[Array, "rows packed"],
    scales: Shaped[Array, "rows ..."],
    decode: Callable,
    use: Callable,
    contract_rows: bool,
    dtype,
) -> Shaped[Array, "m out"]:
    """The product, tile after tile. `decode(codes, scales)` makes a tile out of some
    rows; `use(x, tile)` multiplies with it."""
    rows, packed = codes.shape
    columns = jax.eval_shape(decode, codes, scales).size // rows
    height = tile_rows(rows, columns)
    count, rest = divmod(rows, height)
    m = x.shape[0]

    def rows_of(a, i, axis=0, size=height):
        return lax.dynamic_slice_in_dim(a, i * height, size, axis)

    def decoded(i, size=height):
        return decode(rows_of(codes, i, size=size), rows_of(scales, i, size=size))

    def add(i, tile, out, size=height):
        if contract_rows:
            return out + use(rows_of(x, i, axis=1, size=size), tile)
        # Rows of the weight are rows of the result while it is put together: a tile's
        # results are then contiguous. For large m the transposition would cost more.
        if m <= 8:
            return lax.dynamic_update_slice_in_dim(out, use(x, tile).T, i * height, 0)
        return lax.dynamic_update_slice_in_dim(out, use(x, tile), i * height, 1)

    shape = (m, columns) if contract_rows else (rows, m) if m <= 8 else (m, rows)
    out, _, _, _ = match_varying(jnp.zeros(shape, dtype), x, codes, scales)

    def step(i, carry):
        tile, out = carry
        return decoded(i + 1), add(i, tile, out)

    tile, out = lax.fori_loop(0, count - 1, step, (decoded(0), out))
    out = add(count - 1, tile, out)
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
    height = tile_rows(rows, x.shape[-1])

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
