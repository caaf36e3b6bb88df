"""The activation as the kernel for few rows multiplies it: in the order of the codes,
in digits that the matrix unit takes, and once for every block."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Shaped

from ...formats import Format
from .._int8 import round_int8, split_int8
from ._arrange import split_planes
from ._chips import Chip
from ._tiles import lanes, look_up, planes_of
from ._weights import Kind


@dataclasses.dataclass(frozen=True)
class Digits:
    """How the activation becomes what the matrix unit takes: in so many digits, each
    `base` times what the next is worth."""

    count: int
    base: int
    dtype: Any


def digits_of(x_dtype, kind: Kind, exact: bool, chip: Chip) -> Digits:
    integers = kind == "int8" and chip.int8
    dtype = jnp.int8 if integers else jnp.bfloat16
    one = not exact or x_dtype == (jnp.int8 if integers else jnp.bfloat16)
    if one or x_dtype == jnp.int8:
        return Digits(1, 1, dtype)
    return Digits(2, 254 if integers else 1, dtype)


def _split(x: Float[Array, "m columns"], exact_integers: bool, digits: Digits):
    """The digits of the activation, in float32, and what the last is worth."""
    m = x.shape[0]
    one = jnp.ones((m, 1), jnp.float32)
    if digits.dtype == jnp.int8:
        if exact_integers:
            return [x], one
        if digits.count == 1:
            rows, unit = round_int8(x)
            return [rows.astype(jnp.float32)], unit
        rows, unit = split_int8(x)
        rows = rows.astype(jnp.float32)
        return [rows[:m], rows[m:]], unit[m:]
    if digits.count == 1:
        return [x], one
    high = x.astype(jnp.bfloat16).astype(jnp.float32)
    return [high, x - high], one


def spread(
    x,
    out,
    unit,
    *,
    format: Format,
    digits: Digits,
    group: int,
    chunk: int,
    turned: int,
):
    """In a kernel: from `x` to `out`, chunks of so many bytes of codes, plane by plane.
    Rows are zero in all but one of the `group` blocks of 128 bytes, or, for pairs of
    [`turn`][], in the other of a pair. To `unit`, what the last digit is worth."""
    m, columns = x.shape
    planes = planes_of(format)
    size = lanes * planes
    parts, worth = _split(x.astype(jnp.float32), x.dtype == jnp.int8, digits)
    unit[...] = jnp.broadcast_to(worth, (m, lanes))
    lane = lax.broadcasted_iota(jnp.int32, (m, lanes), 1)
    block = _odd(lane) if turned == 2 else lax.div(lane, jnp.int32(lanes // group))
    for start in range(0, columns, size):
        split = [
            split_planes(digit[:, start : start + size], format) for digit in parts
        ]
        chunk_start, within = divmod(start // planes, chunk)
        for plane in range(planes):
            first = chunk_start * chunk * planes + plane * chunk + within
            each = [digit[plane] for digit in split]
            for half in range(2 if turned == 2 else 1):
                values = [_twice(x, half) for x in each] if turned == 2 else each
                rows = [
                    jnp.where(block == b, value, 0.0) if group > 1 else value
                    for b in range(group)
                    for value in values
                ]
                whole = jnp.concatenate(rows) if len(rows) > 1 else rows[0]
                if digits.dtype == jnp.int8:
                    whole = whole.astype(jnp.int32)
                begin = first * max(turned, 1) + half * lanes
                out[:, begin : begin + lanes] = whole.astype(digits.dtype)


def turn(
    codes: Shaped[Array, "rows bytes"], turned: int
) -> Shaped[Array, "more fewer"]:
    """Transposed; or, if `turned` is 2, pairs of rows transposed as one: even rows
    become even rows of the result, and columns of them."""
    if turned == 1:
        return codes.T
    return pltpu.bitcast(pltpu.bitcast(codes, jnp.uint16).T, codes.dtype)


def interleave(
    even: Float[Array, "m half"], odd: Float[Array, "m half"]
) -> Float[Array, "m 2*half"]:
    """Columns in turn."""
    lane = lax.broadcasted_iota(jnp.int32, (even.shape[0], lanes), 1)
    parts = []
    for start in range(0, even.shape[1], lanes):
        a, b = (x[:, start : start + lanes] for x in (even, odd))
        for half in range(2):
            pair = _twice(a, half), _twice(b, half)
            parts.append(jnp.where(_odd(lane) == 0, *pair))
    return jnp.concatenate(parts, 1)


def _odd(lane):
    return lax.rem(lane, jnp.int32(2))


def _twice(x: Float[Array, "m 128"], half: int) -> Float[Array, "m 128"]:
    """Each column of a half twice."""
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    index = lax.div(lane, jnp.int32(2)) + half * (lanes // 2)
    return look_up(x, index, 1)
