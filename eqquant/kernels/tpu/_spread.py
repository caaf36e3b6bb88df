"""The activation as the kernel for few rows multiplies it: in the order of the codes,
in digits that the matrix unit takes, and once for every block."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Shaped

from .._int8 import row_unit
from ._arrange import split_planes
from ._loop import loop, part_of
from ._operands import Digits
from ._tiles import lanes, look_up, planes_of
from ._weights import Decoder


def _packed(x: Float[Array, "m columns"], digits: Digits) -> Shaped[Array, "m columns"]:
    """Integers whose digits are to be told by shifts: each in as many bits as it has,
    those below zero by their complement."""
    if not digits.integers:
        return x
    x = x.astype(jnp.int32)
    if digits.count == 1:
        return x
    halves = sum(digits.base**i * digits.base // 2 for i in range(digits.count))
    return (x + jnp.int32(halves)) ^ jnp.int32(halves)


def _split(x: Shaped[Array, "m columns"], digits: Digits) -> list:
    """The digits of what [`_packed`][] returns, the highest first: of integers in the
    lowest bits."""
    if digits.count == 1:
        return [x]
    if not digits.integers:
        high = x.astype(jnp.bfloat16).astype(jnp.float32)
        return [high, x - high]
    bits = digits.base.bit_length() - 1
    return [x >> bits * i if i else x for i in reversed(range(digits.count))]


def spread(
    x,
    out,
    unit,
    total,
    *,
    decode: Decoder,
    digits: Digits,
    group: int,
    chunk: int,
    turned: int,
):
    """In a kernel: from `x` to `out`, chunks of so many bytes of codes, operand by
    operand. Rows are zero in all but one of the `group` blocks of 128 bytes, or, for
    pairs of [`turn`][], in the other of a pair. To `unit`, what the last digit is
    worth; to `total`, if numbers are added to what codes become, the sum of a row."""
    m, columns = x.shape
    planes, joined = planes_of(decode.format), len(decode.planes[0])
    # How many rows of an operand there are for a byte.
    copies = max(turned, 1) * joined
    rounds = digits.integers and x.dtype != jnp.int8
    # One 127th of the largest number, and how many of the last digit that is.
    one, ones = jnp.ones((m, 1), jnp.float32), 1.0
    if rounds:
        one, ones = row_unit(x[...].astype(jnp.float32)), digits.largest / 127
    unit[...] = jnp.broadcast_to(one * (1 / ones), (m, lanes))
    lane = lax.broadcasted_iota(jnp.int32, (m, lanes), 1)
    which = lax.rem(lane, jnp.int32(joined))
    block = lax.div(lane, jnp.int32(lanes // group))
    if turned == 2:
        block = lax.rem(lax.div(lane, jnp.int32(joined)), jnp.int32(2))

    def scaled(value, power: float):
        """The columns of a plane, as what digits are of; of which one is so much."""
        if rounds:
            return jnp.round(value * (1 / one) * (ones / power))
        return value * (1 / power) if power != 1 else value

    def spread_chunk(x, out, sums):
        for start in range(0, chunk, lanes):
            part = x[:, start * planes : (start + lanes) * planes]
            by_plane = split_planes(part.astype(jnp.float32), decode.format)
            for i, (some, power) in enumerate(
                zip(decode.planes, decode.powers, strict=True)
            ):
                values = [scaled(by_plane[plane], power) for plane in some]
                for value in values if decode.offset else ():
                    sums = sums + value * power
                values = [_packed(value, digits) for value in values]
                for copy in range(copies):
                    copied = [_repeated(value, copy, copies) for value in values]
                    whole = copied[0]
                    for j in range(1, joined):
                        whole = jnp.where(which == j, copied[j], whole)
                    rows = [
                        jnp.where(block == b, digit, jnp.zeros_like(digit))
                        if group > 1
                        else digit
                        for b in range(group)
                        for digit in _split(whole, digits)
                    ]
                    whole = jnp.concatenate(rows) if len(rows) > 1 else rows[0]
                    if digits.base == 16:  # More of the bits are those of others.
                        whole = whole.astype(jnp.int4)
                    begin = (i * chunk + start) * copies + copy * lanes
                    out[:, begin : begin + lanes] = whole.astype(digits.dtype)
        return sums

    def each(i, sums):
        size = chunk * planes
        some_x = part_of(x, 1, i, size)
        return spread_chunk(some_x, part_of(out, 1, i, size * max(turned, 1)), sums)

    # A register of each digit, of each block.
    registers = chunk * planes * max(turned, 1) * group * digits.count * m // 1024
    sums = jnp.zeros((m, lanes), jnp.float32)
    sums = loop(columns // (chunk * planes), each, sums, bundles=registers)
    if decode.offset:
        total[...] = jnp.broadcast_to(jnp.sum(sums, 1, keepdims=True), (m, lanes))


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
    odd_lane = lax.rem(
        lax.broadcasted_iota(jnp.int32, (even.shape[0], lanes), 1), jnp.int32(2)
    )
    parts = []
    for start in range(0, even.shape[1], lanes):
        a, b = (x[:, start : start + lanes] for x in (even, odd))
        for half in range(2):
            pair = _repeated(a, half, 2), _repeated(b, half, 2)
            parts.append(jnp.where(odd_lane == 0, *pair))
    return jnp.concatenate(parts, 1)


def _repeated(
    x: Shaped[Array, "m 128"], part: int, copies: int
) -> Shaped[Array, "m 128"]:
    """Each column of one of so many parts, so many times."""
    if copies == 1:
        return x
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    index = lax.div(lane, jnp.int32(copies)) + part * (lanes // copies)
    return look_up(x, index, 1)
