"""Quantized scales: decoding, slicing, and rounding to nearest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.formats import (
    Float8Scales,
    FourBitScales,
    IntegerScales,
    PowerOfTwoScales,
    QuantizedScales,
)
from helpers import assert_identical


GROUP = 256


def powers(exponents):
    return np.exp2(np.float64(exponents) - 127)


# Enough blocks for several shared exponents.
def in_groups(rng):
    codes = rng.integers(0, 256, (2, 600)).astype(np.uint8)
    exponents = np.array([[120, 130, 125], [110, 0, 127]], np.uint8)
    units = np.where(exponents == 0, 0, powers(exponents)).repeat(GROUP, -1)[:, :600]
    return QuantizedScales(jnp.asarray(codes), jnp.asarray(exponents)), codes * units


def in_one_group(rng):
    codes = rng.integers(0, 256, (2, 6)).astype(np.uint8)
    exponents = np.array([[120], [130]], np.uint8)
    scales = QuantizedScales(jnp.asarray(codes), jnp.asarray(exponents))
    return scales, codes * powers(exponents)


def in_powers(rng):
    exponents = rng.integers(1, 255, (2, 6)).astype(np.uint8)
    return PowerOfTwoScales(jnp.asarray(exponents)), powers(exponents)


def e4m3(codes):
    """Decode E4M3 by its definition: sign, 4 exponent bits, 3 fraction bits."""
    exponent, fraction = codes >> 3, codes & 7
    whole = np.where(exponent == 0, 0, 8)
    return (whole + fraction) * np.exp2(np.maximum(exponent, 1) - 10.0)


def in_floats(rng):
    codes = rng.integers(0, 127, (2, 6)).astype(np.uint8)
    units = np.array([[0.5], [3.0]], np.float32)
    scales = Float8Scales(jnp.asarray(codes), jnp.asarray(units))
    return scales, e4m3(codes.astype(int)) * units


def in_integers(rng):
    """20 blocks in groups of 8, the last of which is partial."""
    codes = rng.integers(-128, 128, (2, 20)).astype(np.int8)
    units = np.float16(rng.standard_normal((2, 3)))
    scales = IntegerScales(jnp.asarray(codes), jnp.asarray(units))
    return scales, codes * np.float64(units).repeat(8, -1)[:, :20]


def in_four_bits(rng):
    codes = rng.integers(0, 16, (2, 32)).astype(np.uint8)
    units = np.float16(-rng.random((2, 2)))
    pairs = jnp.asarray(codes[:, ::2] | codes[:, 1::2] << 4)
    return FourBitScales(pairs, jnp.asarray(units)), codes * np.float64(units).repeat(
        16, -1
    )


KINDS = [in_groups, in_one_group, in_powers, in_floats, in_integers, in_four_bits]


@pytest.fixture(params=KINDS, ids=lambda make: make.__name__)
def scales(request, rng):
    return request.param(rng)


def test_what_they_stand_for(scales):
    stored, values = scales
    assert (stored.shape, stored.ndim, stored.size) == (values.shape, 2, values.size)
    assert stored.dtype == np.float32
    assert stored.nbytes == sum(part.nbytes for part in jax.tree.leaves(stored))
    np.testing.assert_array_equal(stored.astype(jnp.float32), np.float32(values))


def test_some_of_the_blocks(scales):
    stored, values = scales
    last = values.shape[-1]
    for start, stop in ((0, last), (0, last - 1), (last // 2, last)):
        part = stored.slice(start, stop)
        # This slice of several groups does not start at a group, or ends between two
        # codes in a byte.
        is_short = isinstance(stored, FourBitScales)
        group = 1 if isinstance(stored, PowerOfTwoScales) else stored.group
        if (last > group and start % group) or (is_short and (start % 2 or stop % 2)):
            assert part is NotImplemented
            continue
        expected = np.float32(values[:, start:stop])
        np.testing.assert_array_equal(part.astype(jnp.float32), expected)


def test_a_part_that_begins_with_a_group(rng):
    stored, values = in_groups(rng)
    for stop in (300, 512, 600):
        part = stored.slice(GROUP, stop)
        assert part.exponents.shape[-1] == -(-stop // GROUP) - 1
        expected = np.float32(values[:, GROUP:stop])
        np.testing.assert_array_equal(part.astype(jnp.float32), expected)


@pytest.mark.parametrize("make, codes", [(in_integers, 256), (in_four_bits, 16)])
def test_the_nearest_integers(make, codes, rng):
    """`nearest` finds the best of all codes, and keeps values that have a code."""
    stored, values = make(rng)
    assert_identical(stored.nearest(jnp.asarray(values, jnp.float32)), stored)
    wanted = np.float32(values * rng.uniform(0, 1.5, values.shape))
    got = np.float64(stored.nearest(jnp.asarray(wanted)).astype(jnp.float32))
    possible = np.arange(codes) - (128 if codes == 256 else 0)
    units = np.float64(stored.units).repeat(stored.group, -1)[:, : values.shape[-1]]
    least = np.abs(possible * units[..., None] - wanted[..., None]).min(-1)
    assert (np.abs(got - wanted) <= least + 1e-6 * np.abs(got)).all()


def every_value(stored):
    """Return the value of every code for each block, `(rows, blocks, codes)`."""
    if isinstance(stored, Float8Scales):
        units = np.float64(stored.units)[:, :, None]
        return e4m3(np.arange(127)) * np.broadcast_to(units, (*stored.shape, 1))
    units = np.float64(stored.exponents)
    units = np.where(units == 0, 0, powers(units)).repeat(GROUP, -1)
    return np.arange(256) * units[:, : stored.shape[-1], None]


@pytest.mark.parametrize("make", [in_groups, in_one_group, in_floats])
def test_the_nearest_to_others(make, rng):
    """Compare `nearest` with a search over all codes. Positive scales stay positive."""
    stored, values = make(rng)
    wanted = np.float32(values * rng.uniform(0, 3, values.shape))
    wanted[:, 0], wanted[:, 1], wanted[:, 2] = 0, 1e-30, 1e30
    nearest = stored.nearest(jnp.asarray(wanted))
    got = np.float64(nearest.astype(jnp.float32))
    possible = every_value(stored)
    is_positive = (wanted > 0) & (possible.max(-1) > 0)
    distance = np.abs(possible - wanted[..., None])
    zero_is_out = is_positive[..., None] & (possible == 0)
    least = np.where(zero_is_out, np.inf, distance).min(-1)
    # In float32, a quotient near a tie may round either way.
    tie = 1e-6 * np.abs(got)
    assert (np.abs(got - wanted) <= least + tie).all()
    assert (got[is_positive] > 0).all() and (got[wanted == 0] == 0).all()
    # Representable scales are unchanged.
    again = nearest.nearest(nearest.astype(jnp.float32))
    np.testing.assert_array_equal(again.astype(jnp.float32), got)


def test_the_nearest_power_of_two_is_that_power(rng):
    stored, values = in_powers(rng)
    assert_identical(stored.nearest(jnp.asarray(values, jnp.float32)), stored)


def test_out_of_bounds_lookups(scales):
    """Out-of-bounds rows have the requested fill: NaN or 0."""
    stored, values = scales

    def look_up(part, fill):
        how = {"mode": "clip"} if fill is None else {"mode": "fill", "fill_value": fill}
        return part.at[jnp.array([1, 7])].get(**how)

    for fill in (jnp.nan, 0):
        rows = np.asarray(stored.gather(look_up, fill).astype(jnp.float32))
        np.testing.assert_array_equal(rows[0], np.float32(values[1]))
        if fill == 0:
            assert not rows[1].any()
        else:
            assert np.isnan(rows[1]).all()
