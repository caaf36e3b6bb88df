"""Tables of levels: Lloyd-Max tables, user tables, and three-bit integers."""

import itertools
import math

import eqquant
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Int2, Int3, Int4, NF2, NF3
from eqquant.formats import Codebook
from helpers import in_blocks, relative, slow, sqnr, strict, unpacked


def lloyd_max(count: int) -> np.ndarray:
    """Compute Lloyd-Max levels in float64 by alternating updates.

    Each level is the mean of the normal distribution between its boundaries, and each
    boundary is halfway between two levels.
    """
    cumulative = lambda x: (1 + math.erf(x / math.sqrt(2))) / 2
    density = lambda x: math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    levels = np.linspace(-2, 2, count)
    for _ in range(400):
        ends = [-np.inf, *(levels[1:] + levels[:-1]) / 2, np.inf]
        levels = np.array(
            [
                (density(a) - density(b)) / (cumulative(b) - cumulative(a))
                for a, b in itertools.pairwise(ends)
            ]
        )
    return levels


@pytest.mark.parametrize("cls, outermost", [(NF2, 1.5104), (NF3, 2.1519)])
def test_the_tables_are_those_of_lloyd_and_max(cls, outermost):
    levels = lloyd_max(2**cls.bits)
    assert levels[-1] == pytest.approx(outermost, abs=1e-4)  # Max 1960, table 1.
    expected = (levels / levels[-1]).astype(np.float32)
    np.testing.assert_array_equal(np.float32(cls.table), expected)


@pytest.mark.parametrize(
    "format, bits, decibels",
    [
        (Int3(), 3.25, 15.06),
        *map(
            lambda case: pytest.param(*case, marks=pytest.mark.slow),
            [
                (NF3(), 3.25, 15.35),
                (NF2(), 2.25, 9.55),
                (Int2(), 2.25, 8.99),
                (Int3(fit="absmax"), 3.25, 14.36),
                (Int4(), 5, 21.32),
                (Int4(fit="search"), 5, 21.78),
                (Int4(fit="least_squares"), 5, 21.79),
                (NF3(fit="least_squares"), 3.25, 15.35),
            ],
        ),
    ],
)
def test_accuracy_and_bytes(format, bits, decibels, normal):
    w = normal(128, 1024)
    q = eqquant.quantize(w, format)
    assert 8 * q.nbytes / q.size == bits
    assert sqnr(q.dequantize(), w) == pytest.approx(decibels, abs=0.1)


@pytest.mark.parametrize(
    "values, bits",
    [((1, -1), 1), ((0, -1, 2), 2), ((1, 0.4, 0, -0.4, -1), 3), (range(-4, 5), 4)],
)
def test_a_codebook_against_numpy(values, bits, normal):
    w = normal(4, 128)
    format = Codebook(values)
    table = np.sort(np.float64(np.float32(values)))
    assert format.bits == bits and format == Codebook(tuple(values)[::-1])
    assert hash(format) == hash(Codebook(values))
    q = eqquant.quantize(w, format)
    assert q.nbytes == 4 * 128 * bits // 8 + 4 * 2 * 4
    blocks = in_blocks(w, 64)
    absmax, extreme = np.abs(blocks).max(-1), max(table, key=abs)
    if table[-1] != -table[0]:  # Otherwise the scale is positive.
        absmax = np.where(blocks.max(-1) == absmax, absmax, -absmax)
        absmax = absmax * np.sign(extreme)
    scales = absmax / abs(extreme)
    assert relative(q.scales, scales) < 1e-6
    distance = np.abs(blocks[..., None] / np.float64(q.scales)[..., None, None] - table)
    codes = unpacked(q).reshape(blocks.shape)
    chosen = np.take_along_axis(distance, codes[..., None].astype(int), -1)[..., 0]
    assert (chosen <= distance.min(-1) + 1e-6).all()
    expected = table[codes] * np.float64(q.scales)[..., None]
    assert relative(q.dequantize(), expected.reshape(w.shape)) < 1e-6


def test_a_codebook_multiplies_and_is_saved(normal, tmp_path):
    # Five levels take three bits, with three unused codes.
    q = eqquant.quantize(normal(24, 128), Codebook((-2, -0.5, 0, 0.5, 1)))
    assert q.format.unused_codes == (5, 6, 7)
    assert q.format.used_codes.tolist() == [0, 1, 2, 3, 4]
    x = normal(3, 128)
    product = strict(lambda x, q: x @ q.T)(x, q)
    assert relative(product, np.float64(x) @ np.float64(q.dequantize()).T) < 1e-4
    eqquant.save(tmp_path / "w.safetensors", q)
    loaded = eqquant.load(tmp_path / "w.safetensors", q)
    assert loaded.format == q.format and (loaded.codes == q.codes).all()
    bad = q.replace(codes=q.codes.at[3, -1].set(255))
    with pytest.raises(ValueError, match="codes.*Codebook"):
        eqquant.save(tmp_path / "bad.safetensors", bad)


@pytest.mark.parametrize(
    "values",
    [(1,), range(17), (0, 0), (1, float("nan")), "abc", ((1, 2), (3, 4)), None],
)
def test_bad_values(values):
    with pytest.raises(ValueError, match="values must be 2 to 16 finite numbers"):
        Codebook(values)


def test_a_bad_fit(untyped):
    with pytest.raises(ValueError, match="Int3: fit must be one of .*got 'best'"):
        Int3(fit="best")
    with pytest.raises(ValueError, match="block_size must be a positive multiple of 8"):
        Int3(block_size=12)


@pytest.mark.parametrize("block_size", [64, slow(None), slow(24)])
def test_products_of_three_bits(block_size, normal):
    q = eqquant.quantize(normal(24, 192), Int3(block_size=block_size, fit="absmax"))
    dense = np.float64(q.dequantize())
    levels = unpacked(q).astype(np.float64) - 4
    scales = np.repeat(np.float64(q.scales), 192 // q.scales.shape[-1], -1)
    assert relative(dense, levels * scales) == 0
    x, y = normal(5, 192), normal(5, 24)
    assert relative(strict(jnp.matmul)(x, q.T), np.float64(x) @ dense.T) < 1e-4
    assert relative(strict(jnp.matmul)(y, q), np.float64(y) @ dense) < 1e-4
    if block_size == 64:
        assert relative(q[:, 64:128].dequantize(), dense[:, 64:128]) == 0
        assert relative(q[3:5].dequantize(), dense[3:5]) == 0


def test_scales_in_8_bits(normal):
    w = normal(16, 384)
    twice, once = NF3(double_quantization=True), NF3(scale_dtype="float32")
    q = eqquant.quantize(w, twice)
    # Codes, scales, and an exponent per row.
    assert q.nbytes == twice.scale_bytes(384) * 16 + 16 * 384 * 3 // 8
    assert 8 * q.nbytes / q.size == pytest.approx(3 + 8 / 64 + 8 / 384)
    assert isinstance(q.scales, eqquant.formats.QuantizedScales)
    lost = sqnr(eqquant.quantize(w, once).dequantize(), w) - sqnr(q.dequantize(), w)
    assert abs(lost) < 0.05
    x = jnp.ones((2, 384))
    assert relative(strict(lambda q, x: x @ q.T)(q, x), x @ q.dequantize().T) < 1e-4


def test_what_scales_in_8_bits_cannot_be():
    with pytest.raises(ValueError, match="NF3: scale_dtype must be float32"):
        NF3(scale_dtype="float64", double_quantization=True)
