"""Prepare the activation for the decode kernel: in plane order, split into digits that
the matrix unit multiplies, with one copy per block of a chunk."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Shaped

from .._int8 import scale_of_rows
from ._arrange import split_planes
from ._decode_plan import DecodePlan
from ._loop import loop, part_of
from ._operands import Digits
from ._tiles import lanes, look_up, planes_of


def _to_bits(
    x: Float[Array, "m columns"], digits: Digits
) -> Shaped[Array, "m columns"]:
    """Return integers from which shifts extract the digits. Negative digits are stored
    in two's complement."""
    if not digits.integers:
        return x
    x = x.astype(jnp.int32)
    if digits.count == 1:
        return x
    halves = sum(digits.base**i * digits.base // 2 for i in range(digits.count))
    return (x + jnp.int32(halves)) ^ jnp.int32(halves)


def _split(x: Shaped[Array, "m columns"], digits: Digits) -> list:
    """Split the result of [`_to_bits`][] into digits, the highest first. An integer
    digit is in the lowest bits, below bits of higher digits."""
    if digits.count == 1:
        return [x]
    if not digits.integers:
        high = x.astype(jnp.bfloat16).astype(jnp.float32)
        return [high, x - high]
    bits = digits.base.bit_length() - 1
    return [x >> bits * i if i else x for i in reversed(range(digits.count))]


def spread(plan: DecodePlan, x, out, x_scale, x_sum) -> None:
    """Write the spread activation to `out`, in a kernel.

    Chunks follow each other along the columns, and the operands of a chunk within it.
    Each copy of the activation is zero except in its own block of every 128 bytes. If
    [`transpose_codes`][] transposes pairs of rows together, each of the two copies is
    zero in the rows of the other weight.

    **Arguments:**

    - `plan`: the plan of the product.
    - `x`: the padded activation.
    - `out`: the result.
    - `x_scale`: gets the scale of the last digit for each row of `x`.
    - `x_sum`: gets the sum of each row of `x`, if decoded codes have an offset.
    """
    decode, digits, joined = plan.decode, plan.operands.digits, plan.joined
    copies, chunk = plan.copies, plan.chunk
    m, columns = x.shape
    planes, interleaved = planes_of(decode.format), len(decode.planes[0])
    # Rows of an operand per byte of codes.
    repeats = joined * interleaved
    rounds = digits.integers and x.dtype != jnp.int8
    # The scale of int8, and the steps of the last digit in 1/127 of the largest entry.
    step, steps = jnp.ones((m, 1), jnp.float32), 1.0
    if rounds:
        step, steps = scale_of_rows(x[...].astype(jnp.float32)), digits.largest / 127
    x_scale[...] = jnp.broadcast_to(step * (1 / steps), (m, lanes))
    lane = lax.broadcasted_iota(jnp.int32, (m, lanes), 1)
    plane_of_lane = lax.rem(lane, jnp.int32(interleaved))
    block_of_lane = lax.div(lane, jnp.int32(lanes // copies))
    if joined == 2:
        pair = lax.div(lane, jnp.int32(interleaved))
        block_of_lane = lax.rem(pair, jnp.int32(2))

    def scaled(value, power: float):
        """Scale the columns of a plane to steps of the last digit."""
        if rounds:
            return jnp.round(value * (1 / step) * (steps / power))
        return value * (1 / power) if power != 1 else value

    def digits_of_copies(value) -> list:
        """Return the rows of the spread activation for the columns `value`."""
        return [
            jnp.where(block_of_lane == copy, digit, jnp.zeros_like(digit))
            if copies > 1
            else digit
            for copy in range(copies)
            for digit in _split(value, digits)
        ]

    def spread_chunk(x, out, sums):
        for start in range(0, chunk, lanes):
            part = x[:, start * planes : (start + lanes) * planes]
            by_plane = split_planes(part.astype(jnp.float32), decode.format)
            operands = zip(decode.planes, decode.powers, strict=True)
            for i, (operand_planes, power) in enumerate(operands):
                values = [scaled(by_plane[plane], power) for plane in operand_planes]
                for value in values if decode.offset else ():
                    sums = sums + value * power
                values = [_to_bits(value, digits) for value in values]
                for repeat in range(repeats):
                    repeated = [_repeat(value, repeat, repeats) for value in values]
                    whole = repeated[0]
                    for j in range(1, interleaved):
                        whole = jnp.where(plane_of_lane == j, repeated[j], whole)
                    rows = digits_of_copies(whole)
                    whole = jnp.concatenate(rows) if len(rows) > 1 else rows[0]
                    if digits.base == 16:  # Drop the bits of higher digits.
                        whole = whole.astype(jnp.int4)
                    begin = (i * chunk + start) * repeats + repeat * lanes
                    out[:, begin : begin + lanes] = whole.astype(digits.dtype)
        return sums

    def spread_part(i, sums):
        size = chunk * planes
        part = part_of(out, 1, i, size * joined)
        return spread_chunk(part_of(x, 1, i, size), part, sums)

    # One register per digit of each copy.
    rows = copies * digits.count * m
    bundles = chunk * planes * joined * rows // 1024
    sums = jnp.zeros((m, lanes), jnp.float32)
    sums = loop(columns // (chunk * planes), spread_part, sums, bundles=bundles)
    if decode.offset:
        x_sum[...] = jnp.broadcast_to(jnp.sum(sums, 1, keepdims=True), (m, lanes))


def transpose_codes(
    codes: Shaped[Array, "rows bytes"], transposed: int
) -> Shaped[Array, "more fewer"]:
    """Transpose a tile of codes. If `transposed` is 2, transpose pairs of adjacent rows
    as 16-bit elements: even rows of the result are then even rows of the weight."""
    if transposed == 1:
        return codes.T
    return pltpu.bitcast(pltpu.bitcast(codes, jnp.uint16).T, codes.dtype)


def interleave(
    even: Float[Array, "m half"], odd: Float[Array, "m half"]
) -> Float[Array, "m 2*half"]:
    """Interleave the columns of two matrices."""
    odd_lane = lax.rem(
        lax.broadcasted_iota(jnp.int32, (even.shape[0], lanes), 1), jnp.int32(2)
    )
    parts = []
    for start in range(0, even.shape[1], lanes):
        a, b = (x[:, start : start + lanes] for x in (even, odd))
        for half in range(2):
            pair = _repeat(a, half, 2), _repeat(b, half, 2)
            parts.append(jnp.where(odd_lane == 0, *pair))
    return jnp.concatenate(parts, 1)


def _repeat(
    x: Shaped[Array, "m 128"], part: int, repeats: int
) -> Shaped[Array, "m 128"]:
    """Repeat each column of part `part` of `repeats` equal parts `repeats` times."""
    if repeats == 1:
        return x
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    index = lax.div(lane, jnp.int32(repeats)) + part * (lanes // repeats)
    return look_up(x, index, 1)
