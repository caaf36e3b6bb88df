"""Formats and `eqquant.quantize`."""

import dataclasses
import math

import eqquant
import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Binary, Int8, NF4, Ternary
from helpers import assert_identical
from jax.sharding import NamedSharding, PartitionSpec as P


# QLoRA (arXiv 2305.14314), appendix E.
NF4_TABLE = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)


def sqnr(values, reference) -> float:
    values, reference = (np.asarray(x, np.float64) for x in (values, reference))
    return -10 * math.log10(np.sum((values - reference) ** 2) / np.sum(reference**2))


def unpacked(q: eqquant.QuantizedArray) -> np.ndarray:
    """Codes, one each, decoded here from the documented layout."""
    codes = np.asarray(q.codes)
    bits = q.format.bits
    if bits == 8:
        return codes
    planes = 8 // bits
    *lead, packed = codes.shape
    size = (q.format.block_size or 64) // planes
    groups = codes.reshape(*lead, packed // size, 1, size)
    shifts = (np.arange(planes) * bits).reshape(planes, 1)
    return ((groups >> shifts) & (2**bits - 1)).reshape(*lead, packed * planes)


#
# A format is a value
#


def test_formats_are_frozen_hashable_and_equal_by_value(default_format):
    cls = type(default_format)
    assert cls() == cls() and hash(cls()) == hash(cls())
    assert cls(block_size=16) != cls()
    assert {cls(), cls()} == {cls()}
    with pytest.raises(dataclasses.FrozenInstanceError):
        default_format.block_size = 8


def test_formats_by_name(default_format, normal):
    assert eqquant.quantize(normal(4, 64), default_format.name).format == default_format


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: NF4(block_size=0), ["block_size", "multiple of 2", "0"]),
        (lambda: NF4(block_size=7), ["block_size", "multiple of 2", "7"]),
        (lambda: Ternary(block_size=6), ["block_size", "multiple of 4", "6"]),
        (lambda: Binary(block_size=12), ["block_size", "multiple of 8", "12"]),
        (lambda: Int8(block_size=-1), ["block_size", "-1"]),
        (lambda: NF4(scale_dtype="int8"), ["scale_dtype", "bfloat16", "int8"]),
        (lambda: NF4(scale_dtype="float16"), ["scale_dtype", "float16"]),
        (lambda: Int8(precision="low"), ["precision", "highest", "low"]),
        (lambda: Ternary(rule="best"), ["rule", "absmean", "best"]),
    ],
)
def test_bad_formats_say_what_is_wrong(make, words):
    # Under the import hook of the tests, jaxtyping may be the first to complain.
    with pytest.raises((TypeError, ValueError)) as info:
        make()
    assert all(word in str(info.value) for word in words)


@pytest.mark.parametrize("block_size", [64.0, "64", True])
def test_block_size_is_an_integer(block_size):
    with pytest.raises(TypeError, match="block_size"):
        NF4(block_size=block_size)


#
# NF4
#


def test_nf4_decodes_to_the_published_table_bit_for_bit():
    codes = np.tile(np.arange(16, dtype=np.uint8), 4).reshape(1, 64)
    packed = jnp.asarray(codes[:, :32] | codes[:, 32:] << 4)
    for scale in (1.0, 0.3, 1e-30):
        q = eqquant.from_components(packed, jnp.full((1, 1), scale, jnp.float32), "nf4")
        expected = np.tile(NF4_TABLE, 4)[None] * np.float32(scale)
        assert np.asarray(q.dequantize()).tobytes() == expected.tobytes()


def test_nf4_takes_the_nearest_level():
    rng = np.random.default_rng(1)
    # The largest magnitude of each block is a power of two: normalising is then exact,
    # and so is the comparison with float64.
    blocks = rng.uniform(-1, 1, (4096, 64)).astype(np.float32)
    blocks[:, 0] = 1
    blocks *= 2.0 ** rng.integers(-20, 20, (4096, 1)).astype(np.float32)
    normalised = blocks.astype(np.float64) / np.abs(blocks).max(1, keepdims=True)
    distance = np.abs(normalised[..., None] - NF4_TABLE.astype(np.float64))
    assert (unpacked(eqquant.quantize(blocks, "nf4")) == distance.argmin(-1)).all()


def test_nf4_ties_and_their_neighbours_go_where_argmin_goes():
    table = NF4_TABLE.astype(np.float64)
    middle = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    values = np.concatenate(
        [[1], middle, np.nextafter(middle, 2), np.nextafter(middle, -2)]
    ).astype(np.float32)
    blocks = np.zeros((1, 64), np.float32)
    blocks[0, : len(values)] = values
    exact = (table[1:] + table[:-1]) / 2
    assert (middle == exact).any()  # Some ties can be represented.
    expected = np.abs(blocks.astype(np.float64)[..., None] - table).argmin(-1)
    assert (unpacked(eqquant.quantize(blocks, "nf4")) == expected).all()


def test_nf4_of_any_scale_is_nearest_up_to_rounding(normal):
    w = normal(512, 256)
    q = eqquant.quantize(w, "nf4")
    blocks = np.asarray(w, np.float64).reshape(-1, 64)
    normalised = blocks / np.abs(blocks).max(1, keepdims=True)
    distance = np.abs(normalised[..., None] - NF4_TABLE.astype(np.float64))
    chosen = np.take_along_axis(distance, unpacked(q).reshape(-1, 64)[..., None], -1)
    # One rounding of the quotient: half a unit in the last place of 1.
    assert (chosen[..., 0] <= distance.min(-1) + 2.0**-24).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nf4_scales_are_the_largest_magnitudes(dtype, normal):
    w = normal(16, 256)
    q = eqquant.quantize(w, NF4(scale_dtype=dtype))
    absmax = jnp.max(jnp.abs(w.reshape(16, 4, 64)), -1)
    assert q.scales.dtype == dtype
    assert_identical(q.scales, absmax.astype(dtype))


def test_nf4_scale_search(normal):
    w = normal(512, 1024)
    plain = sqnr(eqquant.quantize(w, "nf4").dequantize(), w)
    searched = eqquant.quantize(w, NF4(scale_search=True))
    gain = sqnr(searched.dequantize(), w) - plain
    assert 0.5 < gain < 0.8  # 20.7 -> 21.3 dB.
    # In no block worse than the plain scale, which is one of those tried.
    error = np.asarray((searched.dequantize() - w) ** 2).reshape(-1, 64).sum(1)
    other = eqquant.quantize(w, "nf4").dequantize()
    assert (error <= 1.00001 * np.asarray((other - w) ** 2).reshape(-1, 64).sum(1)).all()


#
# Int8
#


@pytest.mark.parametrize("block_size", [None, 64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_int8_against_numpy_in_float64(block_size, dtype, normal):
    w = normal(64, 256, dtype=dtype)
    q = eqquant.quantize(w, Int8(block_size=block_size))
    blocks = np.asarray(w, np.float64).reshape(64, -1, block_size or 256)
    absmax = np.abs(blocks).max(-1)
    scales = (absmax.astype(np.float32) / np.float32(127)).astype(np.float64)
    assert q.scales.dtype == jnp.float32
    assert (np.asarray(q.scales) == scales.astype(np.float32)).all()
    quotient = blocks / scales[..., None]
    expected = np.round(quotient)  # Half to even.
    codes = unpacked(q).reshape(blocks.shape)
    assert codes.min() >= -127 and codes.max() <= 127
    # The quotient is rounded to float32 before it is rounded to an integer.
    close = np.abs(np.abs(quotient - np.trunc(quotient)) - 0.5) < 127 * 2.0**-24
    assert (codes == expected)[~close].all()


def test_int8_rounds_half_to_even():
    w = jnp.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]])
    expected = [127, 0, 2, 2, 0, -2, -2, -127]
    assert unpacked(eqquant.quantize(w, "int8"))[0].tolist() == expected


#
# Ternary and binary
#


@pytest.mark.parametrize("rule", ["absmean", "threshold"])
@pytest.mark.parametrize("least_squares", [True, False])
@pytest.mark.parametrize("block_size", [None, 32])
def test_ternary_against_numpy(rule, least_squares, block_size, normal):
    w = normal(32, 128) + 0.1
    format = Ternary(block_size=block_size, rule=rule, least_squares=least_squares)
    q = eqquant.quantize(w, format)
    blocks = np.asarray(w, np.float64).reshape(32, -1, block_size or 128)
    magnitude = np.abs(blocks)
    mean = magnitude.mean(-1, keepdims=True)
    threshold = mean / 2 if rule == "absmean" else blocks.std(-1, keepdims=True) / 2
    nonzero = magnitude > threshold
    best = np.sum(magnitude * nonzero, -1) / np.maximum(nonzero.sum(-1), 1)
    scales = best if least_squares else mean[..., 0]
    values = (np.sign(blocks) * nonzero * scales[..., None]).reshape(32, 128)
    # Sums of 128 terms in float32.
    np.testing.assert_allclose(np.asarray(q.scales), scales, rtol=128 * 2.0**-24)
    np.testing.assert_allclose(np.asarray(q.dequantize()), values, rtol=1e-5)


def test_ternary_stores_two_bits_and_binary_one(normal):
    w = normal(128, 1024)
    scales = 4 * 128
    assert eqquant.quantize(w, "ternary").nbytes - scales == w.size * 2 // 8
    assert eqquant.quantize(w, "binary").nbytes - scales == w.size // 8


@pytest.mark.parametrize("block_size", [None, 64])
def test_binary_against_numpy(block_size, normal):
    w = normal(16, 192).at[0, :5].set(0)
    q = eqquant.quantize(w, Binary(block_size=block_size))
    blocks = np.asarray(w, np.float64).reshape(16, -1, block_size or 192)
    scales = np.abs(blocks).mean(-1)
    np.testing.assert_allclose(np.asarray(q.scales), scales, rtol=192 * 2.0**-24)
    signs = np.where(blocks < 0, -1, 1)
    assert (np.sign(np.asarray(q.dequantize())) == signs.reshape(16, 192)).all()


def test_one_scale_per_tensor(default_format, normal):
    w = normal(8, 64)
    format = dataclasses.replace(default_format, block_size=None)
    q = eqquant.quantize(w, format, axis=(0, 1))
    assert len(np.unique(np.asarray(q.scales))) == 1
    flat = eqquant.quantize(w.reshape(-1), format)
    assert_identical(q.dequantize(), flat.dequantize().reshape(8, 64))


#
# Accuracy
#


@pytest.mark.parametrize(
    "format, expected",
    [
        (NF4(block_size=32), 21.18),
        (NF4(), 20.73),
        (NF4(block_size=128), 20.39),
        (NF4(scale_dtype="bfloat16"), 20.73),
        (NF4(scale_search=True), 21.36),
        (Int8(block_size=64), 44.5),
        (Ternary(rule="absmean", least_squares=False), 5.79),
        (Ternary(rule="absmean"), 6.71),
        (Ternary(), 7.07),
        (Binary(block_size=64), 4.46),
    ],
    ids=repr,
)
def test_signal_to_noise_on_normal_weights(format, expected, normal):
    w = normal(1024, 1024)
    assert abs(sqnr(eqquant.quantize(w, format).dequantize(), w) - expected) < 0.1


def test_requantizing_is_the_identity(format, normal):
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        w = normal(33, 100, dtype=dtype)
        for axis in (-1, 0, (0, 1)):
            q = eqquant.quantize(w, format, axis=axis)
            again = eqquant.quantize(q.dequantize(), format, axis=axis)
            assert_identical(again.dequantize(), q.dequantize())
            if dtype == jnp.float32:
                assert_identical(again, q)


@pytest.mark.parametrize("exponent", [-4, -14])
def test_small_float16_weights_lose_nothing_more(format, exponent, normal):
    # By a power of two, so that the weights themselves are rounded no differently: down
    # to 2**-14 * 2**-10 float16 is subnormal.
    w = normal(16, 128, dtype=jnp.float16)
    small = (w * jnp.float16(2.0**exponent)).astype(jnp.float16)
    q = eqquant.quantize(small, format)
    exact = eqquant.quantize(small.astype(jnp.float32), format)
    assert_identical(q.codes, exact.codes)
    assert_identical(q.scales, exact.scales)
    noise = sqnr(exact.dequantize(), small)
    assert noise > sqnr(eqquant.quantize(w, format).dequantize(), w) - 0.1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("edge", ["largest", "smallest"])
def test_the_edges_of_the_range(format, dtype, edge, normal):
    info = jnp.finfo(dtype)
    unit = np.clip(np.asarray(normal(8, 128), np.float64) / 3, -1, 1)
    unit[:, 0] = 1
    w = jnp.asarray(unit * float(info.max if edge == "largest" else info.tiny), dtype)
    w = jnp.where(jnp.abs(w) < info.tiny, 0, w)  # Flushed to zero, by XLA:CPU.
    values = np.asarray(eqquant.quantize(w, format).dequantize(), np.float64)
    assert np.isfinite(values).all()
    assert np.abs(values).max() > 0
    if edge == "largest":
        ordinary = jnp.asarray(unit, dtype)
        expected = sqnr(eqquant.quantize(ordinary, format).dequantize(), ordinary)
        assert sqnr(values, w) > expected - 0.5


def test_float64_weights():
    with jax.enable_x64(True):
        w = jnp.asarray(np.random.default_rng(0).standard_normal((8, 128)))
        assert w.dtype == jnp.float64
        q = eqquant.quantize(w, NF4(scale_dtype="float64"))
        blocks = np.asarray(w).reshape(8, 2, 64)
        assert (np.asarray(q.scales) == np.abs(blocks).max(-1)).all()
        expected = NF4_TABLE.astype(np.float64)[unpacked(q)].reshape(8, 2, 64)
        expected = (expected * np.asarray(q.scales)[..., None]).reshape(8, 128)
        assert q.dequantize().dtype == jnp.float64
        assert (np.asarray(q.dequantize()) == expected).all()
        int8 = eqquant.quantize(w, "int8")
        assert int8.scales.dtype == jnp.float32 and sqnr(int8.dequantize(), w) > 40
        for huge in (1e300, 1e-300):
            with pytest.raises(ValueError, match="float32 cannot hold"):
                eqquant.quantize(w * huge, "int8")
            q = eqquant.quantize(w * huge, Int8(scale_dtype="float64"))
            assert sqnr(q.dequantize() / huge, w) > 40


def test_float64_scales_need_x64(normal):
    with pytest.raises(ValueError, match="jax_enable_x64"):
        eqquant.quantize(normal(4, 64), NF4(scale_dtype="float64"))


def test_zeros_are_exact(format):
    for w in (jnp.zeros((4, 100)), jnp.eye(5, 100)):
        values = eqquant.quantize(w, format).dequantize()
        assert (values[:, 64:] == 0).all() or format.block_size is None
        if not w.any():
            assert (values == 0).all()


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0), (2, 0, 3)])
def test_empty_arrays(format, shape):
    q = eqquant.quantize(jnp.zeros(shape), format)
    assert q.shape == shape and q.dequantize().shape == shape


#
# Shapes and axes
#


@hypothesis.given(data=st.data())
def test_any_shape_axis_block_size_and_dtype(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    axes = list(range(-len(shape), len(shape)))
    axis = data.draw(
        st.sampled_from(axes)
        | st.lists(st.sampled_from(axes), min_size=1, max_size=3).map(tuple)
    )
    make = data.draw(st.sampled_from([NF4, Int8, Ternary, Binary]))
    format = make(block_size=data.draw(st.sampled_from([None, 8, 16, 64])))
    dtype = data.draw(st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]))
    w = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
    chosen = {a % len(shape) for a in (axis if isinstance(axis, tuple) else (axis,))}
    if isinstance(axis, tuple) and len(chosen) < len(axis):
        with pytest.raises(ValueError, match="distinct"):
            eqquant.quantize(w, format, axis=axis)
        return
    q = eqquant.quantize(w, format, axis=axis)
    assert (q.shape, q.dtype) == (shape, dtype)
    # The same rows quantized by themselves.
    lead = [a for a in range(len(shape)) if a not in chosen]
    rows = jnp.transpose(w, (*lead, *sorted(chosen))).reshape(
        *(shape[a] for a in lead), -1
    )
    expected = eqquant.quantize(rows, format).dequantize()
    moved = jnp.transpose(q.dequantize(), (*lead, *sorted(chosen)))
    assert_identical(moved.reshape(rows.shape), expected)


def test_a_partial_block_is_invisible(format, normal):
    w = normal(3, 100)
    for size in (1, 31, 33, 65, 100):
        q = eqquant.quantize(w[:, :size], format)
        assert q.shape == (3, size) and q.dequantize().shape == (3, size)
        if format.block_size:
            full = size // format.block_size * format.block_size
            whole = eqquant.quantize(w[:, :full], format).dequantize()
            assert_identical(q.dequantize()[:, :full], whole)


@pytest.mark.parametrize("axis", [2, -3, (0, 5), (), (0, 0), (1, -1)])
def test_bad_axes(axis, normal):
    with pytest.raises(ValueError, match="axis must"):
        eqquant.quantize(normal(4, 8), "int8", axis=axis)


def test_bad_arrays():
    with pytest.raises(TypeError, match="floating-point dtype, got int32"):
        eqquant.quantize(jnp.arange(8), "int8")
    with pytest.raises(ValueError, match="at least one axis"):
        eqquant.quantize(jnp.float32(1), "int8")
    with pytest.raises(ValueError, match=r"format must be one of \[.*nf4.*got 'nf5'"):
        eqquant.quantize(jnp.ones(8), "nf5")
    with pytest.raises(Exception, match="array"):
        eqquant.quantize([1.0, 2.0], "nf4")


#
# What is not finite
#


@pytest.mark.parametrize("shape", [(64, 64), (3, 7), (1, 1000)])
def test_nan_and_infinity_are_counted(format, shape):
    w = np.ones(shape, np.float32)
    w[0, :2] = np.nan
    w[-1, -1] = np.inf
    with pytest.raises(ValueError, match="2 values are NaN and 1 are infinite"):
        eqquant.quantize(w, format)
    eqquant.quantize(w, format, check_finite=False)


def test_every_single_nan_is_found(format):
    for position in (0, 1, 31, 63, 64, 129):
        w = np.ones((2, 130), np.float32)
        w[1, position] = np.nan
        with pytest.raises(ValueError, match="1 values are NaN"):
            eqquant.quantize(w, format)


def test_nan_under_jit_is_a_runtime_error(format):
    w = jnp.ones((4, 64)).at[0, 0].set(jnp.nan)
    quantize = eqx.filter_jit(lambda w: eqquant.quantize(w, format))
    with pytest.raises(Exception, match="not finite"):
        jax.block_until_ready(quantize(w).codes)
    unchecked = jax.jit(lambda w: eqquant.quantize(w, format, check_finite=False))
    jax.block_until_ready(unchecked(w))


#
# It is an ordinary JAX function
#


def test_jit_vmap_and_eval_shape(format, normal):
    w = normal(3, 20, 100)
    expected = eqquant.quantize(w, format)
    assert_identical(jax.jit(lambda w: eqquant.quantize(w, format))(w), expected)
    assert_identical(jax.vmap(lambda w: eqquant.quantize(w, format))(w), expected)
    shapes = jax.eval_shape(lambda w: eqquant.quantize(w, format), w)
    assert jax.tree.structure(shapes) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(shapes), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
def test_sharded_input(format, spec, normal):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    w = normal(16, 512)
    split = jax.device_put(w, NamedSharding(mesh, spec))
    q = eqquant.quantize(split, format)
    expected = eqquant.quantize(w, format)
    assert_identical(q.codes, expected.codes)
    # A sum over devices adds up in another order.
    np.testing.assert_allclose(q.scales, expected.scales, rtol=1e-6)


def test_numpy_arrays(format, normal):
    w = normal(4, 64)
    assert_identical(
        eqquant.quantize(np.asarray(w), format), eqquant.quantize(w, format)
    )


def test_temporaries_are_small(normal):
    from eqquant._quantize import _encode

    w = normal(1024, 4096)
    for format in (NF4(), Int8(), Ternary(), Binary()):
        lowered = _encode.lower(w, format=format, axes=(-1,), chunked=True)
        temporary = lowered.compile().memory_analysis().temp_size_in_bytes
        assert temporary < w.nbytes / 4
