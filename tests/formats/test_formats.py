"""The formats: what they store, against references in NumPy."""

import dataclasses
import math

import eqquant
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from eqquant import Binary, Int8, NF4, Ternary
from helpers import assert_identical, sqnr


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
    np.float64,
)
# One rounding to float32, relative.
EPS = 2.0**-24

decode = jax.jit(eqquant.dequantize)


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


def in_blocks(w, block_size: int | None) -> np.ndarray:
    w = np.asarray(w, np.float64)
    return w.reshape(*w.shape[:-1], -1, block_size or w.shape[-1])


#
# A format is a value
#


def test_formats_are_equal_by_value_and_hashable(default_format):
    cls = type(default_format)
    assert cls() == cls() and hash(cls()) == hash(cls())
    assert cls(block_size=16) != cls()
    assert len({cls(), cls(), cls(block_size=16)}) == 2
    assert cls(scale_dtype=jnp.bfloat16) == cls(scale_dtype="bfloat16")


def test_formats_of_different_kinds_differ():
    assert NF4(block_size=64) != Int8(block_size=64)


def test_formats_are_frozen(default_format):
    for field in dataclasses.fields(default_format):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(default_format, field.name, None)


def test_formats_by_name(default_format, normal):
    assert eqquant.quantize(normal(4, 64), default_format.name).format == default_format


def test_the_defaults_of_the_issue():
    assert NF4() == NF4(block_size=64, scale_dtype="float32", scale_search=False)
    assert Int8() == Int8(block_size=None, scale_dtype="float32")
    assert Ternary().least_squares


@pytest.fixture
def untyped(monkeypatch):
    """As users have it: of a format, jaxtyping checks nothing."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize(
    "cls, error, argument, given, accepted",
    [
        (NF4, ValueError, "block_size", 0, "positive multiple of 2"),
        (NF4, ValueError, "block_size", 7, "positive multiple of 2"),
        (Ternary, ValueError, "block_size", 6, "positive multiple of 4"),
        (Binary, ValueError, "block_size", 12, "positive multiple of 8"),
        (Int8, ValueError, "block_size", -1, "positive multiple of 1"),
        (NF4, TypeError, "block_size", 64.0, "positive integer or None"),
        (NF4, TypeError, "block_size", "64", "positive integer or None"),
        (Int8, TypeError, "block_size", True, "positive integer or None"),
        (NF4, ValueError, "scale_dtype", "int8", "bfloat16', 'float32', 'float64"),
        (Int8, ValueError, "scale_dtype", "float16", "bfloat16', 'float32', 'float64"),
        (Int8, ValueError, "scale_dtype", "floaty", "bfloat16', 'float32', 'float64"),
        (Int8, ValueError, "precision", "low", "highest', 'high', 'default"),
        (Ternary, ValueError, "rule", "best", "absmean', 'threshold"),
    ],
)
def test_bad_formats_say_what_is_wrong(untyped, cls, error, argument, given, accepted):
    message = f"{cls.__name__}: {argument} must be .*{accepted}.* got {given!r}"
    with pytest.raises(error, match=message):
        cls(**{argument: given})


#
# NF4
#


@pytest.mark.parametrize("scale", [1.0, 0.3, 1e-30])
def test_nf4_decodes_to_the_published_table_bit_for_bit(scale):
    codes = np.tile(np.arange(16, dtype=np.uint8), 4).reshape(1, 64)
    packed = jnp.asarray(codes[:, :32] | codes[:, 32:] << 4)
    q = eqquant.from_components(packed, jnp.full((1, 1), scale, jnp.float32), "nf4")
    table = NF4_TABLE.astype(np.float32)
    assert (table == NF4_TABLE).all()  # Published in float32.
    expected = np.tile(table, 4)[None] * np.float32(scale)
    assert np.asarray(decode(q)).tobytes() == expected.tobytes()


def nearest(normalised: np.ndarray) -> np.ndarray:
    """By argmin in float64, which of two equally near takes the lower."""
    return np.abs(normalised[..., None].astype(np.float64) - NF4_TABLE).argmin(-1)


def test_nf4_takes_the_nearest_level(rng):
    # The largest magnitude of each block is a power of two: normalising is then exact.
    blocks = rng.uniform(-1, 1, (1024, 64)).astype(np.float32)
    blocks[:, 0] = 1
    scaled = blocks * 2.0 ** rng.integers(-20, 20, (1024, 1)).astype(np.float32)
    assert (unpacked(eqquant.quantize(scaled, "nf4")) == nearest(blocks)).all()


def test_nf4_ties_and_their_neighbours_go_where_argmin_goes():
    middle = (NF4_TABLE[1:] + NF4_TABLE[:-1]) / 2
    rounded = middle.astype(np.float32)
    ties = rounded == middle
    assert ties.sum() >= 5  # That many can be represented.
    values = [rounded, np.nextafter(rounded, 2), np.nextafter(rounded, -2), [1]]
    block = np.zeros((1, 64), np.float32)
    block[0, :46] = np.concatenate(values)
    codes = unpacked(eqquant.quantize(block, "nf4"))
    assert (codes == nearest(block)).all()
    assert (codes[0, :15][ties] == np.arange(15)[ties]).all()  # The lower level.


@hypothesis.given(
    hnp.arrays(np.float32, (1, 64), elements=st.floats(-1, 1, width=32)),
)
def test_nf4_takes_the_nearest_level_of_anything(block):
    block[np.abs(block) < 1e-30] = 0  # XLA on a CPU takes subnormal numbers as zero.
    block[0, 0] = 1
    assert (unpacked(eqquant.quantize(block, "nf4")) == nearest(block)).all()


def test_nf4_of_any_scale_is_nearest_up_to_rounding(normal):
    w = normal(64, 256)
    blocks = in_blocks(w, 64)
    normalised = blocks / np.abs(blocks).max(-1, keepdims=True)
    distance = np.abs(normalised[..., None] - NF4_TABLE)
    codes = unpacked(eqquant.quantize(w, "nf4")).reshape(blocks.shape)
    chosen = np.take_along_axis(distance, codes[..., None], -1)[..., 0]
    # The quotient, at most 1, is rounded once.
    assert (chosen <= distance.min(-1) + EPS).all()


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
def test_nf4_scales_are_the_largest_magnitudes(scale_dtype, normal):
    w = normal(16, 256)
    q = eqquant.quantize(w, NF4(scale_dtype=scale_dtype))
    absmax = jnp.max(jnp.abs(w.reshape(16, 4, 64)), -1)
    assert_identical(q.scales, absmax.astype(scale_dtype))


def test_nf4_scale_search_gains_half_a_decibel_and_loses_in_no_block(normal):
    w = normal(256, 1024)
    plain = decode(eqquant.quantize(w, NF4()))
    searched = decode(eqquant.quantize(w, NF4(scale_search=True)))
    # FACTS section 3: 20.73 -> 21.36.
    assert abs(sqnr(searched, w) - sqnr(plain, w) - 0.63) < 0.05

    def errors(values):
        return np.sum((in_blocks(values, 64) - in_blocks(w, 64)) ** 2, -1)

    # The plain scale is one of those tried. Errors are summed in float32, 64 terms.
    assert (errors(searched) <= errors(plain) * (1 + 64 * EPS)).all()


#
# Scales in 8 bits
#

TWICE = NF4(double_quantization=True)


@pytest.mark.parametrize(
    # Codes, scales, and an exponent for each 256 scales of a row.
    "size, bits",
    [
        (384, 4 + 8 / 64 + 8 / 384),
        (4096, 4 + 8 / 64 + 8 / 4096),
        (16384, 4 + 8 / 64 + 8 / 16384),
    ],
)
def test_double_quantization_costs_no_accuracy(size, bits, normal):
    w = normal(2**20 // size, size)
    q = eqquant.quantize(w, TWICE)
    assert 8 * q.nbytes / q.size == pytest.approx(bits, abs=0.002)
    if size >= 4096:
        assert 8 * q.nbytes / q.size <= 4.127
    once = sqnr(decode(eqquant.quantize(w, NF4())), w)
    # Whatever part of the range of an exponent is in use.
    for factor in (1, 1.2, 1.5, 1.9):
        values = decode(eqquant.quantize(w * factor, TWICE)) / factor
        assert abs(sqnr(values, w) - once) < 0.01


def test_scales_in_8_bits_against_numpy(rng):
    # Blocks of very different magnitudes, and more of them than share an exponent.
    magnitude = 2.0 ** rng.uniform(-30, 30, (8, 1, 1)) * rng.uniform(1, 50, (8, 300, 1))
    w = (magnitude * rng.standard_normal((8, 300, 64))).astype(np.float32)
    w[0, :5] = 0
    q = eqquant.quantize(w.reshape(8, -1), TWICE)
    absmax = np.abs(w).max(-1).astype(np.float64)
    for group in (slice(0, 256), slice(256, 300)):
        largest = absmax[:, group].max(-1, keepdims=True)
        unit = 2.0 ** np.ceil(np.log2(largest / 255))
        codes = np.round(absmax[:, group] / unit)
        codes = np.maximum(codes, absmax[:, group] > 0)
        assert codes.max() <= 255
        assert (np.asarray(q.scales.codes)[:, group] == codes).all()
        scales = np.asarray(q.scales.astype(jnp.float64), np.float64)[:, group]
        assert (scales == codes * unit).all()
    assert q.scales.exponents.shape == (8, 2)
    assert (decode(q)[0, : 5 * 64] == 0).all()


def test_structure_with_scales_in_8_bits(normal):
    q = eqquant.quantize(normal(3, 4, 64 * 300), TWICE)
    w = decode(q)
    for part in (q[1], q[:, 2:], q.transpose(1, 0, 2), q[jnp.array([2, 0])]):
        assert part.scales.codes.shape[-1] == 300
    assert_identical(decode(q[:, :, 64 * 256 :]), w[:, :, 64 * 256 :])
    assert_identical(decode(q[:, :, : 64 * 256]), w[:, :, : 64 * 256])
    with pytest.warns(eqquant.MaterialiseWarning):  # It cuts through a group.
        assert_identical(q[:, :, 64:], w[:, :, 64:])
    short = eqquant.quantize(normal(4, 256), TWICE)
    assert isinstance(short[:, 64:192], eqquant.QuantizedArray)
    assert_identical(decode(short[:, 64:192]), decode(short)[:, 64:192])
    table = eqquant.quaxify(lambda q: jnp.take(q, jnp.array([0, 9]), axis=0))(short)
    assert_identical(table[0], decode(short)[0])
    assert jnp.isnan(table[1]).all()  # Out of bounds, as `jnp.take` has it.
    again = eqquant.from_components(short.codes, short.scales, TWICE)
    assert_identical(again, short)


def test_what_double_quantization_cannot_be(normal):
    with pytest.raises(ValueError, match="block_size must be an integer, got None"):
        NF4(block_size=None, double_quantization=True)
    with pytest.raises(ValueError, match="scale_dtype must be float32.*'bfloat16'"):
        NF4(scale_dtype="bfloat16", double_quantization=True)
    q = eqquant.quantize(normal(4, 64), "nf4")
    with pytest.raises(TypeError, match="scales of .* must be eqquant.QuantizedScales"):
        eqquant.from_components(q.codes, q.scales, TWICE)
    with pytest.raises(ValueError, match="scales cannot be given to"):
        eqquant.quantize(normal(4, 64), TWICE, scales=q.scales)


#
# Int8
#


@pytest.mark.parametrize("block_size", [None, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_int8_against_numpy_in_float64(block_size, dtype, normal):
    w = normal(64, 256, dtype=dtype)
    q = eqquant.quantize(w, Int8(block_size=block_size))
    blocks = in_blocks(w, block_size)
    scales = (np.abs(blocks).max(-1) / 127).astype(np.float32)
    assert_identical(q.scales, scales)
    quotient = blocks / scales[..., None].astype(np.float64)
    codes = unpacked(q).reshape(blocks.shape)
    # The quotient, at most 127, is rounded to float32 before it is to an integer.
    to_half = np.abs(np.abs(quotient - np.trunc(quotient)) - 0.5)
    clear = to_half > 128 * EPS
    assert clear.mean() > 0.99
    assert (codes == np.round(quotient))[clear].all()
    assert (np.abs(codes - quotient) <= 0.5 + 128 * EPS).all()


def test_int8_codes_are_symmetric(normal):
    codes = unpacked(eqquant.quantize(normal(64, 256), "int8"))
    assert (np.abs(codes.astype(int)).max(-1) == 127).all()


def test_int8_rounds_half_to_even():
    w = jnp.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5, -127.0]])
    expected = [127, 0, 2, 2, 0, -2, -2, 126, -126, -127]
    assert unpacked(eqquant.quantize(w, "int8"))[0].tolist() == expected


def test_int8_of_what_it_decoded_is_the_same_for_every_scale(rng):
    # `127 * scale / 127` is rounded twice, so that this is not obvious: it takes a
    # mantissa of every residue.
    w = rng.uniform(1, 2, (2**14, 4)).astype(np.float32)
    q = eqquant.quantize(w, "int8")
    assert_identical(eqquant.quantize(decode(q), "int8"), q)


#
# Ternary
#


@pytest.mark.parametrize("rule", ["absmean", "threshold"])
@pytest.mark.parametrize("least_squares", [True, False])
@pytest.mark.parametrize("block_size", [None, 32])
def test_ternary_against_numpy(rule, least_squares, block_size, normal):
    w = normal(32, 128) + 0.1
    format = Ternary(block_size=block_size, rule=rule, least_squares=least_squares)
    q = eqquant.quantize(w, format)
    blocks = in_blocks(w, block_size)
    magnitude = np.abs(blocks)
    mean = magnitude.mean(-1, keepdims=True)
    threshold = mean / 2 if rule == "absmean" else blocks.std(-1, keepdims=True) / 2
    nonzero = magnitude > threshold
    codes = (np.sign(blocks) * nonzero).astype(int).reshape(32, 128)
    assert (unpacked(q) == codes % 4).all()  # Two's complement in two bits.
    best = np.sum(magnitude * nonzero, -1) / nonzero.sum(-1)
    scales = best if least_squares else mean[..., 0]
    # A sum of at most 128 terms.
    np.testing.assert_allclose(np.asarray(q.scales), scales, rtol=128 * EPS)


def test_the_default_ternary_is_the_most_accurate(normal):
    w = normal(256, 1024)

    def accuracy(**options):
        return sqnr(decode(eqquant.quantize(w, Ternary(**options))), w)

    for rule in ("absmean", "threshold"):
        for least_squares in (True, False):
            assert accuracy() >= accuracy(rule=rule, least_squares=least_squares)


#
# Binary
#


@pytest.mark.parametrize("block_size", [None, 64])
def test_binary_against_numpy(block_size, normal):
    w = normal(16, 192).at[0, :5].set(0).at[0, 5:9].set(-0.0)
    q = eqquant.quantize(w, Binary(block_size=block_size))
    blocks = in_blocks(w, block_size)
    # Zero, of either sign, is +1: a bit that is not set.
    assert (unpacked(q) == (blocks < 0).reshape(16, 192)).all()
    # A sum of at most 192 terms.
    scales = np.abs(blocks).mean(-1)
    np.testing.assert_allclose(np.asarray(q.scales), scales, rtol=192 * EPS)
    values = np.where(blocks < 0, -1, 1) * np.asarray(q.scales)[..., None]
    assert (in_blocks(decode(q), block_size) == values).all()


#
# All of them
#


@pytest.mark.parametrize(
    "name, bits", [("nf4", 4), ("int8", 8), ("ternary", 2), ("binary", 1)]
)
def test_bits_stored(name, bits, normal):
    q = eqquant.quantize(normal(128, 1024), name)
    assert q.codes.nbytes == q.size * bits // 8
    assert q.nbytes == q.codes.nbytes + 4 * q.scales.size


def test_no_more_levels_than_bits_allow(default_format, normal):
    q = eqquant.quantize(normal(4, 1024), default_format)
    levels = np.unique(np.asarray(decode(q)[0, :64] / q.scales[0, 0]))
    assert len(levels) <= 2**default_format.bits


def test_scales_per_channel_per_block_and_per_tensor(default_format, normal):
    w = normal(8, 256)

    def scales(block_size, axis):
        format = dataclasses.replace(default_format, block_size=block_size)
        return np.asarray(eqquant.quantize(w, format, axis=axis).scales)

    assert scales(None, -1).shape == (8, 1)
    assert scales(64, -1).shape == (8, 4)
    assert len(np.unique(scales(None, (0, 1)))) == 1


def test_one_scale_per_tensor(default_format, normal):
    w = normal(8, 64)
    format = dataclasses.replace(default_format, block_size=None)
    q = eqquant.quantize(w, format, axis=(0, 1))
    flat = eqquant.quantize(w.reshape(-1), format)
    assert_identical(decode(q), flat.dequantize().reshape(8, 64))


#
# Accuracy
#


def gaussian_ternary(threshold: float) -> float:
    """What ternary with the least-squares scale explains of a standard normal: with
    density f and tail Q, `(2 f)^2 / (2 Q)` of its variance."""
    density = math.exp(-(threshold**2) / 2) / math.sqrt(2 * math.pi)
    tail = math.erfc(threshold / math.sqrt(2)) / 2
    return -10 * math.log10(1 - 2 * density**2 / tail)


@pytest.fixture(scope="module")
def large():
    return jax.random.normal(jax.random.key(0), (1024, 4096))


# In decibels: FACTS section 3, or derived here. To 0.05, of which sampling takes 0.01.
@pytest.mark.parametrize(
    "format, expected",
    [
        (NF4(block_size=32), 21.18),
        (NF4(), 20.73),
        (NF4(block_size=128), 20.39),
        (NF4(scale_dtype="bfloat16"), 20.73),
        (NF4(scale_search=True), 21.36),
        (Int8(), 41.25),  # Given to a tenth: 41.3.
        (Int8(block_size=64), 44.53),  # 44.5.
        (Ternary(rule="absmean", least_squares=False), 5.79),
        (Ternary(rule="absmean"), 6.71),
        (Ternary(rule="absmean"), gaussian_ternary(math.sqrt(2 / math.pi) / 2)),
        (Ternary(), gaussian_ternary(1 / 2)),
        (Binary(), -10 * math.log10(1 - 2 / math.pi)),
        (Binary(block_size=64), 4.46),
    ],
    ids=repr,
)
def test_signal_to_noise_on_normal_weights(format, expected, large):
    values = decode(eqquant.quantize(large, format))
    assert abs(sqnr(values, large) - expected) < 0.05


def test_no_format_wastes_a_bit(default_format, large):
    # A bit is worth 6.02 decibels at best (rate-distortion theory).
    accuracy = sqnr(decode(eqquant.quantize(large, default_format)), large)
    assert 5.8 * (default_format.bits - 1) < accuracy < 6.02 * default_format.bits
