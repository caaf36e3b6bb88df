"""`eqquant.quantize`: dtypes, shapes, axes, values and errors."""

import functools as ft
import itertools
import math

import eqquant
import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import NF4, Ternary
from helpers import (
    assert_identical,
    DEFAULT_FORMATS,
    FORMATS,
    pairs,
    relative,
    SCALED,
    sqnr,
)


FLOATS = ["float32", "bfloat16", "float16"]
# Not divisible by blocks of 32 or 64, or groups of 64. All tests share the size, so
# that each format is compiled once.
SHAPE = (6, 200)

decode = jax.jit(eqquant.dequantize)


#
# Quantizing a dequantized array is the identity
#


@pairs("format, dtype", FORMATS, FLOATS)
def test_requantizing_is_the_identity(format, dtype, normal):
    q = eqquant.quantize(normal(*SHAPE, dtype=dtype), format)
    again = eqquant.quantize(decode(q), format)
    assert_identical(decode(again), decode(q))
    if dtype == "float32":
        assert_identical(again, q)


def test_requantizing_with_a_searched_scale_is_the_identity_in_float32(normal):
    # One of the candidate scales has no error.
    q = eqquant.quantize(normal(64, 256), NF4(fit="search"))
    assert_identical(eqquant.quantize(decode(q), q.format), q)


def test_requantizing_with_the_mean_as_scale_cannot_be_the_identity(normal):
    # The documented exceptions exist; otherwise the tests above would be vacuous.
    q = eqquant.quantize(normal(*SHAPE), Ternary(least_squares=False))
    assert (decode(eqquant.quantize(decode(q), q.format)) != decode(q)).any()


#
# Dtypes
#


@pairs("format, dtype", FORMATS, FLOATS)
def test_scales_have_their_dtype_whatever_that_of_the_array(format, dtype, normal):
    q = eqquant.quantize(normal(*SHAPE, dtype=dtype), format)
    assert q.dtype == dtype and decode(q).dtype == dtype
    assert q.scales.dtype == format.scale_dtype


@pairs("format, dtype, size", FORMATS, FLOATS[1:], [1e-5, 1.0, 300.0])
def test_short_floats_quantize_as_the_same_values_in_float32(
    format, dtype, size, normal
):
    # 1e-5 is subnormal in float16.
    w = (normal(*SHAPE) * size).astype(dtype)
    q = eqquant.quantize(w, format)
    expected = eqquant.quantize(w.astype(jnp.float32), format)
    assert_identical(q.astype(jnp.float32), expected)
    # Only the result is rounded.
    assert_identical(decode(q), decode(expected).astype(dtype))


def scaled(format, exponent: int, w):
    """Return codes, scales and values for `w` times a power of two, scaled back."""
    q = eqquant.quantize(jnp.asarray(np.ldexp(w, exponent), w.dtype), format)
    return (
        np.asarray(q.codes),
        np.ldexp(np.asarray(q.scales.astype(jnp.float32)), -exponent),
        np.ldexp(np.asarray(decode(q), np.float64), -exponent),
    )


def test_a_power_of_two_changes_nothing_from_the_smallest_to_the_largest(format, rng):
    # Not below 2**-116, because the smallest level must be a normal number.
    magnitude = rng.uniform(0.01, 1, SHAPE).astype(np.float32)
    w = magnitude * rng.choice([-1, 1], SHAPE).astype(np.float32)
    expected = scaled(format, 0, w)
    # The float32 scale of NVFP4 is 2688 times smaller than the largest value.
    smallest = -104 if format.name == "nvfp4" else -116
    for exponent in (smallest, -60, 60, 127):
        assert_identical(scaled(format, exponent, w), expected)


@pairs(
    "format, dtype",
    [
        # MXFP4 clips values just below a power of two by up to a quarter.
        *(f for f in DEFAULT_FORMATS if f.name != "mxfp4"),
        *(make(scale_dtype="bfloat16") for make in SCALED),
        NF4(fit="search"),
    ],
    FLOATS,
)
def test_the_largest_values_stay_finite_and_accurate(format, dtype, rng):
    largest = float(jnp.finfo(dtype).max)
    w = rng.uniform(-1, 1, SHAPE)
    w[:, ::32] = 1
    w[0] = -1

    def noise(w):
        values = np.asarray(decode(eqquant.quantize(w, format)), np.float64)
        assert np.isfinite(values).all()
        return relative(values / largest, np.asarray(w, np.float64) / largest)

    # The dtype rounds the two sets of weights differently. A bfloat16 scale may be one
    # unit in the last place smaller, to avoid overflow.
    slack = 2.0**-7 if format.scale_dtype == "bfloat16" else 0
    ordinary = jnp.asarray(w, dtype)
    assert noise(jnp.asarray(w * largest, dtype)) < 1.02 * noise(ordinary) + slack


def test_float64(default_format):
    with jax.enable_x64(True):
        w = jnp.asarray(np.random.default_rng(0).standard_normal(SHAPE))
        q = eqquant.quantize(w, default_format)
        assert q.dtype == decode(q).dtype == jnp.float64
        assert q.scales.dtype == default_format.scale_dtype
        assert_identical(eqquant.quantize(decode(q), default_format), q)
        short = eqquant.quantize(w.astype(jnp.float32), default_format)
        # Rounding w to float32 can move values within 2**-24 of a boundary.
        assert abs(sqnr(decode(q), w) - sqnr(decode(short), w)) < 0.01


def test_float64_scales(default_format):
    if type(default_format) not in SCALED:
        pytest.skip("Its scales are not floats.")
    format = type(default_format)(scale_dtype="float64")
    with jax.enable_x64(True):
        w = jnp.asarray(np.random.default_rng(0).standard_normal(SHAPE))
        q = eqquant.quantize(w, format)
        assert q.scales.dtype == jnp.float64
        expected = sqnr(decode(q), w)
        for factor in (2.0**900, 2.0**-900):  # Far above the range of float32.
            q = eqquant.quantize(w * factor, format)
            assert abs(sqnr(decode(q) / factor, w) - expected) < 1e-9


def test_nf4_with_float64_scales_loses_nothing_to_float32():
    with jax.enable_x64(True):
        w = jnp.asarray(np.random.default_rng(0).standard_normal((8, 64)))
        q = eqquant.quantize(w, NF4(scale_dtype="float64"))
        absmax = jnp.max(jnp.abs(w), -1)
        assert_identical(q.scales[:, 0], absmax)
        assert_identical(jnp.max(jnp.abs(decode(q)), -1), absmax)


def test_float64_beyond_the_scales_is_an_error(default_format):
    with jax.enable_x64(True):
        for size in (1e300, 1e-300):
            with pytest.raises(ValueError, match="(bfloat16|float32) cannot hold"):
                eqquant.quantize(jnp.full((2, 64), size, jnp.float64), default_format)


def test_float64_scales_need_x64(normal):
    with pytest.raises(ValueError, match="scale_dtype='float64' needs jax_enable_x64"):
        eqquant.quantize(normal(*SHAPE), NF4(scale_dtype="float64"))


def test_numpy_arrays(format, normal):
    w = normal(*SHAPE)
    assert_identical(
        eqquant.quantize(np.asarray(w), format), eqquant.quantize(w, format)
    )


#
# Shapes and axes
#


@hypothesis.settings(max_examples=6)
@hypothesis.given(data=st.data())
def test_any_shape_axis_block_size_and_dtype(data):
    ndim = data.draw(st.integers(1, 4), "ndim")
    longest = {1: 300, 2: 80, 3: 12, 4: 7}[ndim]
    sizes = st.lists(st.integers(1, longest), min_size=ndim, max_size=ndim)
    shape = tuple(data.draw(sizes, "shape"))
    some_axes = st.lists(st.integers(0, ndim - 1), min_size=1, unique=True).map(tuple)
    axis = data.draw(st.integers(-ndim, ndim - 1) | some_axes, "axis")
    make = data.draw(st.sampled_from(SCALED), "format")
    format = make(block_size=data.draw(st.sampled_from([None, 8, 24, 64])))
    dtype = data.draw(st.sampled_from(FLOATS), "dtype")
    w = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)

    q = eqquant.quantize(w, format, axis=axis)
    assert (q.shape, q.dtype) == (shape, dtype)
    assert_identical(decode(eqquant.quantize(decode(q), format, axis=axis)), decode(q))

    # Equal to each row alone, if blocks do not cross rows.
    blocked = sorted(a % ndim for a in np.atleast_1d(axis))
    order = (*(a for a in range(ndim) if a not in blocked), *blocked)

    def rows(x):
        size = math.prod(shape[a] for a in blocked)
        return np.asarray(x).transpose(order).reshape(-1, size)

    assert_identical(rows(decode(q)), decode(eqquant.quantize(rows(w), format)))


def test_a_partial_block_is_invisible(format, normal):
    w = normal(*SHAPE)
    values = decode(eqquant.quantize(w, format))
    assert values.shape == SHAPE
    # Quantized scales share an exponent with other blocks.
    if format.block_size and not format.quantized_scales:
        full = SHAPE[-1] // format.block_size * format.block_size
        assert_identical(
            decode(eqquant.quantize(w[:, :full], format)), values[:, :full]
        )
        assert_identical(
            decode(eqquant.quantize(w[:, full:], format)), values[:, full:]
        )


def test_zero_blocks_are_exact(format):
    w = jnp.zeros(SHAPE).at[::2, ::150].set(1)
    values = decode(eqquant.quantize(w, format))
    assert (values[1::2] == 0).all()
    if format.block_size:
        assert (values[:, 64:128] == 0).all()


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0), (2, 0, 3), (0, 0)])
def test_empty_arrays(format, shape):
    q = eqquant.quantize(jnp.zeros(shape), format)
    assert q.shape == decode(q).shape == shape
    for count in range(1, len(shape) + 1):
        for axis in itertools.combinations(range(len(shape)), count):
            quantize = ft.partial(eqquant.quantize, format=format, axis=axis)
            q = jax.eval_shape(quantize, jnp.zeros(shape))
            assert q.shape == jax.eval_shape(eqquant.dequantize, q).shape == shape


@pytest.mark.parametrize("axis", [2, -3, (0, 5)])
def test_axes_out_of_range(axis, normal):
    message = r"axis must be between -2 and 1 for an array of 2 axes, got "
    with pytest.raises(ValueError, match=message) as info:
        eqquant.quantize(normal(4, 8), "int8", axis=axis)
    assert str(axis) in str(info.value)


@pytest.mark.parametrize("axis", [(), (0, 0), (1, -1)])
def test_axes_that_are_not_distinct(axis, normal):
    with pytest.raises(ValueError, match="axis must name one axis or several distinct"):
        eqquant.quantize(normal(4, 8), "int8", axis=axis)


#
# Arrays that are not finite floats
#


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64"])
def test_only_floats(dtype):
    message = f"array must have a floating-point dtype, got {dtype}"
    with pytest.raises(TypeError, match=message):
        eqquant.quantize(jnp.ones(8, dtype), "int8")


def test_no_scalars():
    with pytest.raises(ValueError, match="array must have at least one axis"):
        eqquant.quantize(jnp.float32(1), "int8")


def test_unknown_formats():
    with pytest.raises(ValueError, match="format is 'nf5', but must .*'nf4'"):
        eqquant.quantize(jnp.ones(8), "nf5")


def test_nan_and_infinity_are_counted(format):
    w = np.ones(SHAPE, np.float32)
    w[0, :2], w[3, 7], w[-1, -1] = np.nan, np.inf, -np.inf
    message = "2 values are NaN and 2 are infinite, out of 1200.*check_finite=False"
    with pytest.raises(ValueError, match=message):
        eqquant.quantize(w, format)


def test_every_single_nan_is_found(format):
    for position in (0, 1, 31, 63, 64, 199):
        w = np.ones(SHAPE, np.float32)
        w[5, position] = np.nan
        with pytest.raises(ValueError, match="1 values are NaN and 0 are infinite"):
            eqquant.quantize(w, format)


def test_the_check_can_be_turned_off(format):
    w = np.ones(SHAPE, np.float32)
    w[0, 0] = np.nan
    q = eqquant.quantize(w, format, check_finite=False)
    close = lambda x: np.abs(np.asarray(x) - 1).max() <= 2**-17  # NVFP4: 16 bits.
    assert close(decode(q)[1:])
    unchecked = jax.jit(lambda w: eqquant.quantize(w, format, check_finite=False))
    assert close(decode(unchecked(w))[1:])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_under_jit_it_is_an_error_at_run_time(default_format, bad):
    @eqx.filter_jit
    def values(w):
        return eqquant.quantize(w, default_format).dequantize()

    w = jnp.ones(SHAPE)
    assert np.abs(values(w) - 1).max() <= 2**-17  # NVFP4 keeps 16 bits.
    with pytest.raises(eqx.EquinoxRuntimeError, match="not finite"):
        values(w.at[0, 0].set(bad))


@pytest.mark.parametrize("part", ["codes", "scales"])
def test_under_jit_either_part_alone_carries_the_error(part):
    w = jnp.ones(SHAPE).at[0, 0].set(jnp.nan)
    only = eqx.filter_jit(lambda w: getattr(eqquant.quantize(w, "nf4"), part))
    with pytest.raises(eqx.EquinoxRuntimeError, match="not finite"):
        only(w)


def test_the_other_axis_is_that_of_the_transpose(normal):
    w = normal(64, 128)
    q, transposed = eqquant.quantize(w, "nf4", axis=0), eqquant.quantize(w.T, "nf4")
    assert_identical((q.codes, q.scales), (transposed.codes, transposed.scales))


@pytest.mark.parametrize(
    "format", [eqquant.NF4(), eqquant.Int8(block_size=32)], ids=repr
)
def test_scales_that_are_given(format, normal):
    w = normal(3, 5, 128)
    q = eqquant.quantize(w, format)
    assert_identical(eqquant.quantize(w, format, scales=q.scales), q)
    for bad in (0.0, -0.5, jnp.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            eqquant.quantize(w, format, scales=q.scales.at[1, 2, 0].set(bad))


def test_a_large_array_is_quantized_row_by_row(normal):
    """A large array is encoded in chunks: see `_map_chunks`."""
    w = normal(4200, 512)
    q = eqquant.quantize(w, "int8")
    for rows in (slice(0, 8), slice(2044, 2052), slice(4092, 4100), slice(4190, 4200)):
        part = eqquant.quantize(w[rows], "int8")
        assert_identical((q.codes[rows], q.scales[rows]), (part.codes, part.scales))


@pytest.mark.parametrize("format", ["int8", "int4", "ternary"])
def test_what_given_scales_cannot_hold_is_the_last_level(format, normal):
    w = normal(3, 64)
    scales = eqquant.quantize(w, format).scales / 2
    q = eqquant.quantize(w, format, scales=scales).dequantize()
    assert jnp.all(jnp.sign(q) == jnp.where(q == 0, 0.0, jnp.sign(w)))
    assert jnp.all(jnp.abs(q) <= jnp.abs(w).max() / 2 * 1.2)
