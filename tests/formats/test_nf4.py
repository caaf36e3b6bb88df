"""NF4 and 8-bit scales, against references in NumPy."""

import eqquant
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import NF4
from eqquant.formats import scales_split
from eqquant.formats._two_level_scales import quantize_scales
from helpers import assert_identical, in_blocks, sqnr, unpacked


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


@pytest.mark.parametrize("scale", [1.0, 0.3, 1e-30])
def test_nf4_decodes_to_the_published_table_bit_for_bit(scale):
    codes = np.tile(np.arange(16, dtype=np.uint8), 4).reshape(1, 64)
    packed = jnp.asarray(codes[:, :32] | codes[:, 32:] << 4)
    q = eqquant.arrays.from_components(
        packed, jnp.full((1, 1), scale, jnp.float32), "nf4"
    )
    table = NF4_TABLE.astype(np.float32)
    assert (table == NF4_TABLE).all()  # Published in float32.
    expected = np.tile(table, 4)[None] * np.float32(scale)
    assert np.asarray(decode(q)).tobytes() == expected.tobytes()


def nearest(normalised: np.ndarray) -> np.ndarray:
    """Encode by argmin in float64. A tie takes the lower level."""
    return np.abs(normalised[..., None].astype(np.float64) - NF4_TABLE).argmin(-1)


def test_nf4_takes_the_nearest_level(rng):
    # The absmax of each block is a power of two, so that normalising is exact.
    blocks = rng.uniform(-1, 1, (1024, 64)).astype(np.float32)
    blocks[:, 0] = 1
    scaled = blocks * 2.0 ** rng.integers(-20, 20, (1024, 1)).astype(np.float32)
    assert (unpacked(eqquant.quantize(scaled, "nf4")) == nearest(blocks)).all()


def test_nf4_ties_and_their_neighbours_go_where_argmin_goes():
    middle = (NF4_TABLE[1:] + NF4_TABLE[:-1]) / 2
    rounded = middle.astype(np.float32)
    ties = rounded == middle
    assert ties.sum() >= 5  # The number of representable values.
    values = [rounded, np.nextafter(rounded, 2), np.nextafter(rounded, -2), [1]]
    block = np.zeros((1, 64), np.float32)
    block[0, :46] = np.concatenate(values)
    codes = unpacked(eqquant.quantize(block, "nf4"))
    assert (codes == nearest(block)).all()
    # A tie takes the lower level.
    assert (codes[0, :15][ties] == np.arange(15)[ties]).all()


@hypothesis.given(
    hnp.arrays(np.float32, (1, 64), elements=st.floats(-1, 1, width=32)),
)
def test_nf4_takes_the_nearest_level_of_anything(block):
    block[np.abs(block) < 1e-30] = 0  # XLA:CPU flushes subnormal numbers to zero.
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


def test_nf4_search_gains_half_a_decibel_and_loses_in_no_block(normal):
    w = normal(256, 1024)
    plain = decode(eqquant.quantize(w, NF4()))
    searched = decode(eqquant.quantize(w, NF4(fit="search")))
    # Measured: 20.73 without the search, 21.36 with it.
    assert abs(sqnr(searched, w) - sqnr(plain, w) - 0.63) < 0.05

    def errors(values):
        return np.sum((in_blocks(values, 64) - in_blocks(w, 64)) ** 2, -1)

    # The plain scale is a candidate. Errors are float32 sums of 64 terms.
    assert (errors(searched) <= errors(plain) * (1 + 64 * EPS)).all()


#
# 8-bit scales
#

TWICE = NF4(double_quantization=True)


@pytest.mark.parametrize(
    # Codes, scales, and an exponent per 256 scales of a row.
    "size, bits",
    [
        (384, 4 + 8 / 64 + 8 / 384),
        pytest.param(4096, 4 + 8 / 64 + 8 / 4096, marks=pytest.mark.slow),
        pytest.param(16384, 4 + 8 / 64 + 8 / 16384, marks=pytest.mark.slow),
    ],
)
def test_double_quantization_costs_no_accuracy(size, bits, normal):
    w = normal(2**20 // size, size)
    q = eqquant.quantize(w, TWICE)
    assert 8 * q.nbytes / q.size == pytest.approx(bits, abs=0.002)
    if size >= 4096:
        assert 8 * q.nbytes / q.size <= 4.127
    once = sqnr(decode(eqquant.quantize(w, NF4())), w)
    # For every used part of the range of an exponent.
    for factor in (1, 1.2, 1.5, 1.9):
        values = decode(eqquant.quantize(w * factor, TWICE)) / factor
        assert abs(sqnr(values, w) - once) < 0.01


def test_scales_in_8_bits_against_numpy(rng):
    # Blocks of very different magnitudes, more than share an exponent.
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


@pytest.mark.slow
def test_structure_with_scales_in_8_bits(normal):
    q = eqquant.quantize(normal(3, 4, 64 * 300), TWICE)
    w = decode(q)
    for part in (q[1], q[:, 2:], q.transpose(1, 0, 2), q[jnp.array([2, 0])]):
        assert part.scales.codes.shape[-1] == 300
    assert_identical(decode(q[:, :, 64 * 256 :]), w[:, :, 64 * 256 :])
    assert_identical(decode(q[:, :, : 64 * 256]), w[:, :, : 64 * 256])
    with pytest.warns(eqquant.arrays.MaterialiseWarning):  # The slice cuts a group.
        assert_identical(q[:, :, 64:], w[:, :, 64:])
    short = eqquant.quantize(normal(4, 256), TWICE)
    assert isinstance(short[:, 64:192], eqquant.QuantizedArray)
    assert_identical(decode(short[:, 64:192]), decode(short)[:, 64:192])
    table = eqquant.quaxify(lambda q: jnp.take(q, jnp.array([0, 9]), axis=0))(short)
    assert_identical(table[0], decode(short)[0])
    assert jnp.isnan(table[1]).all()  # Out of bounds, like `jnp.take`.
    again = eqquant.arrays.from_components(short.codes, short.scales, TWICE)
    assert_identical(again, short)


def test_what_double_quantization_cannot_be(normal):
    with pytest.raises(ValueError, match="block_size must be an integer with"):
        NF4(block_size=None, double_quantization=True)
    with pytest.raises(ValueError, match="scale_dtype must be float32.*'bfloat16'"):
        NF4(scale_dtype="bfloat16", double_quantization=True)
    q = eqquant.quantize(normal(4, 64), "nf4")
    with pytest.raises(
        TypeError, match="scales of .* must be eqquant.formats.QuantizedScales"
    ):
        eqquant.arrays.from_components(q.codes, q.scales, TWICE)
    with pytest.raises(ValueError, match="scales cannot be given to"):
        eqquant.quantize(normal(4, 64), TWICE, scales=q.scales)


def test_where_scales_that_are_quantized_can_be_split(normal):
    scales = eqquant.quantize(normal(1, 64 * 512), TWICE).scales
    assert scales_split(scales, 2)
    assert not scales_split(scales, 4)


def test_the_smallest_scales_are_exact():
    scales = jnp.array([[255, 3, 0]], jnp.float32) * jnp.float32(2**-126)
    assert_identical(quantize_scales(scales, 1.0).astype(jnp.float32), scales)
