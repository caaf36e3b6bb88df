"""The activation as the kernel for few rows multiplies it: in the order of the codes,
in digits that the matrix unit takes, and once for every block."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Shaped

from ...formats import Format
from .._int8 import row_unit
from ._arrange import split_planes
from ._chips import Chip
from ._loop import loop, part_of
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


def _split(x: Float[Array, "m columns"], unit, digits: Digits):
    """The digits of the activation, in float32."""
    if digits.dtype == jnp.int8:
        x = x if unit is None else x * (1 / unit)
        high = jnp.round(x)
        return [high, jnp.round((x - high) * digits.base)][: digits.count]
    if digits.count == 1:
        return [x]
    high = x.astype(jnp.bfloat16).astype(jnp.float32)
    return [high, x - high]


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
    rounds = digits.dtype == jnp.int8 and x.dtype != jnp.int8
    worth = row_unit(x[...].astype(jnp.float32)) if rounds else None
    last = jnp.ones((m, 1), jnp.float32) if worth is None else worth
    last = last / digits.base ** (digits.count - 1)
    unit[...] = jnp.broadcast_to(last, (m, lanes))
    lane = lax.broadcasted_iota(jnp.int32, (m, lanes), 1)
    block = _odd(lane) if turned == 2 else lax.div(lane, jnp.int32(lanes // group))

    def spread_chunk(x, out):
        for start in range(0, chunk, lanes):
            part = x[:, start * planes : (start + lanes) * planes]
            parts = _split(part.astype(jnp.float32), worth, digits)
            split = [split_planes(digit, format) for digit in parts]
            for plane, half in itertools.product(range(planes), range(turned or 1)):
                values = [digit[plane] for digit in split]
                if turned == 2:
                    values = [_twice(value, half) for value in values]
                rows = [
                    jnp.where(block == b, value, 0.0) if group > 1 else value
                    for b in range(group)
                    for value in values
                ]
                whole = jnp.concatenate(rows) if len(rows) > 1 else rows[0]
                if digits.dtype == jnp.int8:
                    whole = whole.astype(jnp.int32)
                begin = (plane * chunk + start) * max(turned, 1) + half * lanes
                out[:, begin : begin + lanes] = whole.astype(digits.dtype)

    def each(i, _):
        size = chunk * planes
        spread_chunk(part_of(x, 1, i, size), part_of(out, 1, i, size * max(turned, 1)))
        return ()

    # A register of each digit, of each block.
    registers = chunk * planes * max(turned, 1) * group * digits.count * m // 1024
    loop(columns // (chunk * planes), each, bundles=registers)


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
