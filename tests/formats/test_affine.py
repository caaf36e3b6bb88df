"""Formats with offsets: `value = level * scale + offset`."""

import functools

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Int2, Int3, Int4, Int8, NF3
from eqquant.formats import Codebook, Int5, Int6
from helpers import assert_identical, relative, slow, sqnr, strict, unpacked


INT4 = Int4(affine=True)
TWICE = Int4(affine=True, double_quantization=True)
AFFINE = [
    INT4,
    TWICE,
    Int5(scale_dtype="float16", affine=True, unsigned=True),
    slow(Int4(affine=True, unsigned=True, fit="search")),
    slow(Int3(affine=True, unsigned=True, double_quantization=True)),
    slow(NF3(affine=True, block_size=32, double_quantization=True)),
    slow(Int4(affine=True, block_size=None)),
    slow(Int4(affine=True, block_size=64, scale_dtype="bfloat16", fit="search")),
    slow(Int3(affine=True)),
    Int8(block_size=32, affine=True),
    slow(Int8(block_size=64, affine=True, unsigned=True)),
    slow(Int2(affine=True, block_size=32, fit="least_squares")),
    slow(NF3(affine=True)),
    slow(Codebook((0, 1, 3), affine=True)),
]


@pytest.fixture(params=AFFINE, ids=repr)
def q(request, normal):
    return eqquant.quantize(normal(24, 192) + 0.5, request.param)


def test_values_against_numpy(q):
    format = q.format
    blocks = unpacked(q).astype(int).reshape(*q.scales.shape, -1)
    # Codes are places in the table. Codes of 8 bits start at -128.
    first = -128 if format.bits == 8 else 0
    levels = np.asarray(format.table, np.float64)[blocks - first]
    part = lambda a: np.asarray(a.astype(jnp.float32), np.float64)[..., None]
    dense = (levels * part(q.scales) + part(q.offsets)).reshape(24, 192)
    np.testing.assert_allclose(q.dequantize(), dense, rtol=1e-6, atol=1e-6)
    assert q.nbytes == 24 * (192 * format.bits // 8 + format.scale_bytes(192))


def test_the_ends_of_a_block_are_levels(normal):
    w = normal(8, 64) - 3
    q = eqquant.quantize(w, INT4)
    blocks = np.float64(w).reshape(8, 2, 32)
    low, high = blocks.min(-1), blocks.max(-1)
    assert relative(q.scales, (high - low) / 15) < 1e-6
    # The level halfway between the lowest and the highest is -0.5.
    assert relative(q.offsets, (high + low) / 2 + np.float64(q.scales) / 2) < 1e-6
    values = np.asarray(q.dequantize()).reshape(8, 2, 32)
    # Scaled levels and offsets cancel near zero.
    np.testing.assert_allclose(values.max(-1), high, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(values.min(-1), low, rtol=1e-6, atol=1e-6)
    constant = eqquant.quantize(jnp.full((2, 64), 3.25), INT4)
    assert (constant.dequantize() == 3.25).all()


def test_products(q, normal):
    dense, x, y = np.float64(q.dequantize()), normal(5, 192), normal(5, 24)
    tolerance = 1e-4
    multiply = jax.jit(strict(jnp.matmul))
    assert relative(multiply(x, q.T), np.float64(x) @ dense.T) < tolerance
    assert relative(multiply(y, q), np.float64(y) @ dense) < tolerance
    assert relative(jax.vmap(lambda v: q @ v)(x), np.float64(x) @ dense.T) < tolerance
    out = jax.grad(lambda x: jnp.sum(jnp.sin(x @ q.T)))(x)
    expected = np.cos(np.float64(x @ q.T)) @ dense
    assert relative(out, expected) < 1e-4


@pytest.mark.parametrize("make", [Int8, Int6, Int4, Int2])
def test_unsigned_levels(make, normal):
    """The smallest value of a block becomes its offset. Products and gradients equal
    those of the dequantized array."""
    fit = {} if make is Int8 else {"fit": "absmax"}
    format = make(32, "float16", affine=True, unsigned=True, **fit)
    assert (format.table[0], format.table[-1]) == (0, 2**format.bits - 1)
    w, x = normal(24, 64) - 3, normal(5, 64)
    q = eqquant.quantize(w, format)
    smallest = np.asarray(w).reshape(24, 2, 32).min(-1)
    assert_identical(q.offsets, smallest.astype(np.float16))
    lowest = -128 if make is Int8 else 0
    assert (unpacked(q).reshape(24, 2, 32).min(-1) == lowest).all()
    by_scale = lambda fn: jax.grad(lambda s: fn(q.replace(scales=s)))(q.scales)
    actual = by_scale(lambda q: jnp.sum(jnp.sin(strict(lambda q: x @ q.T)(q))))
    expected = by_scale(lambda q: jnp.sum(jnp.sin(x @ q.dequantize().T)))
    assert relative(actual, expected) < 3e-3  # float16 gradients.
    direct = eqquant.primitives.quantized_dot(x, q.codes, q.scales, format=format)
    levels = np.float64(q.replace(offsets=jnp.zeros_like(q.offsets)).dequantize())
    assert relative(direct, np.float64(x) @ levels.T) < 1e-4
    with pytest.raises(ValueError, match="affine must be True with unsigned"):
        make(unsigned=True)


def test_activations_are_rounded_for_offsets_too(normal):
    # The weight is only offsets, so the product is exact for the rounded activation.
    q = eqquant.quantize(jnp.full((3, 64), 2.0), INT4, activations="int8")
    x = normal(5, 64)
    rounded = np.float64(eqquant.training.round_activations(x))
    assert relative(x @ q.T, rounded.sum(-1, keepdims=True) * np.full(3, 2.0)) < 1e-5


def test_structure(q):
    dense = q.dequantize()
    table = eqquant.quaxify(lambda q, i: jnp.take(q, i, axis=0))
    indices = jnp.array([3, 30])
    for part, expected in [
        (q[3:7], dense[3:7]),
        (q.T, dense.T),
        (q * 0.5, dense * 0.5),
        (-q, -dense),
        (q.reshape(4, 6, 192), dense.reshape(4, 6, 192)),
    ]:
        assert isinstance(part, eqquant.QuantizedArray)
        # Values, not bits, because zero can have either sign.
        np.testing.assert_array_equal(part.dequantize(), expected)
    assert_identical(q[5], dense[5])
    assert jnp.isnan(table(q, indices)[1]).all()
    if q.format.block_size:
        assert_identical(q[:, 64:128].dequantize(), dense[:, 64:128])
    stacked = eqx.filter_vmap(lambda w: eqquant.quantize(w, q.format))(dense[:4, None])
    assert stacked.offsets.shape[:2] == (4, 1)
    joined = strict(lambda *parts: jnp.concatenate(parts))(q, q)
    assert_identical(joined.dequantize(), jnp.concatenate([dense, dense]))


def test_training(normal):
    w, x = normal(24, 64), normal(5, 64)
    straight = lambda w: jnp.sum(eqquant.straight_through(w, INT4, clip=True) @ x.T)
    expected = np.broadcast_to(np.float64(x).sum(0), w.shape)
    assert relative(jax.grad(straight)(w), expected) < 1e-5
    q = eqquant.quantize(w, INT4)
    by_offset = jax.grad(lambda o: jnp.sum(q.replace(offsets=o) @ x.T))(q.offsets)
    sums = np.float64(x).reshape(5, 2, 32).sum((0, 2))
    assert relative(by_offset, np.broadcast_to(sums, (24, 2))) < 1e-5
    with pytest.raises(ValueError, match="must have no offsets"):
        eqquant.training.initial_scales(w, INT4)


def test_a_model(normal, tmp_path):
    mlp = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0))
    quantized = eqquant.quantize_tree(mlp, INT4)
    report = eqquant.report(quantized, mlp)
    expected = quantized.layers[0].weight.nbytes
    assert expected == 64 * (32 + 2 * 2 * 4)
    assert any(row.bits == 6 for row in report.rows)
    x = normal(64)
    lora = eqquant.lora_tree(quantized, rank=2, key=jax.random.key(1))
    assert relative(lora(x), quantized(x)) < 1e-5
    eqquant.save(tmp_path / "m.safetensors", quantized)
    loaded = eqquant.load(tmp_path / "m.safetensors", mlp)
    assert_identical(loaded, quantized)


def test_parts_that_are_given(normal):
    w = normal(4, 64)
    q = eqquant.quantize(w, INT4)
    same = eqquant.quantize(w, INT4, scales=q.scales, offsets=q.offsets)
    assert_identical(same, q)
    again = eqquant.arrays.from_components(q.codes, q.scales, INT4, offsets=q.offsets)
    assert_identical(again, q)
    with pytest.raises(ValueError, match="offsets go with scales, for an affine"):
        eqquant.quantize(w, INT4, scales=q.scales)
    with pytest.raises(ValueError, match="offsets go with scales, for an affine"):
        eqquant.quantize(w, "int4", scales=q.scales, offsets=q.offsets)
    with pytest.raises(ValueError, match="needs offsets"):
        eqquant.arrays.from_components(q.codes, q.scales, INT4)
    with pytest.raises(TypeError, match="offsets must be float32"):
        eqquant.arrays.from_components(
            q.codes, q.scales, INT4, offsets=q.offsets.astype("bfloat16")
        )
    with pytest.raises(ValueError, match="cannot hold"):
        eqquant.quantize(w * 1e38, INT4)


def test_offsets_in_8_bits(normal, tmp_path):
    rows = np.array([[3.0], [-3e4], [0], [1e-30], [1e37]], np.float32)
    w = normal(5, 9216) * jnp.abs(rows) / 16 + rows
    q, once = eqquant.quantize(w, TWICE), eqquant.quantize(w, INT4)
    assert isinstance(q.offsets, eqquant.formats.QuantizedOffsets)
    # 288 codes and two exponents, for scales and for offsets.
    assert q.nbytes == 5 * (9216 // 2 + 2 * (288 + 2))
    exponents = np.float64(q.offsets.exponents).repeat(256, -1)[:, :288] - 127
    units = np.where(exponents == -127, 0, np.exp2(exponents))
    assert_identical(
        q.offsets.astype(jnp.float32), np.float32(np.float64(q.offsets.codes) * units)
    )
    # Rounded to nearest. The largest value of a group uses all bits.
    error = np.abs(np.float64(q.offsets.astype(jnp.float32)) - np.float64(once.offsets))
    assert np.all(error <= 1.001 * units)
    largest = np.abs(np.asarray(q.offsets.codes)).max(-1)
    assert largest.tolist()[2] == 0 and all(largest[[0, 1, 3, 4]] >= 63)
    dense, before = q.dequantize(), once.dequantize()
    for i in range(5):
        assert relative(dense[i], w[i]) <= 1.1 * relative(before[i], w[i])
    eqquant.save(tmp_path / "q.safetensors", q)
    assert_identical(eqquant.load(tmp_path / "q.safetensors", like=q), q)
    again = eqquant.arrays.from_components(q.codes, q.scales, TWICE, offsets=q.offsets)
    assert_identical(again, q)


def test_what_offsets_in_8_bits_cannot_be(normal):
    with pytest.raises(ValueError, match="Int4: affine must be True with double"):
        Int4(double_quantization=True)
    q = eqquant.quantize(normal(4, 64), TWICE)
    with pytest.raises(TypeError, match="offsets of .*QuantizedOffsets"):
        eqquant.arrays.from_components(
            q.codes, q.scales, TWICE, offsets=q.offsets.astype(jnp.float32)
        )
    with pytest.raises(TypeError, match="offsets of .* must be an array"):
        plain = Int4(affine=True)
        scales = q.scales.astype(jnp.float32)
        eqquant.arrays.from_components(q.codes, scales, plain, offsets=q.offsets)
    with pytest.raises(ValueError, match="scales cannot be given to"):
        floats = q.float_parts
        eqquant.quantize(normal(4, 64), TWICE, scales=floats[0], offsets=floats[1])


@pytest.mark.slow
def test_least_squares_gain(normal):
    w = normal(256, 1024)
    for cls, plain, fitted in [(Int4, 22.1, 22.9), (Int2, 8.1, 10.4)]:
        for fit, expected in [("absmax", plain), ("least_squares", fitted)]:
            format = cls(affine=True, fit=fit, block_size=32, scale_dtype="float32")
            values = eqquant.quantize(w, format).dequantize()
            assert sqnr(values, w) == pytest.approx(expected, abs=0.15)


@pytest.mark.slow
def test_equal_importance_of_all_values_changes_nothing(normal):
    format = Int4(affine=True, fit="least_squares", scale_dtype="float32")
    blocks = normal(6, 2, 32) + 0.5
    absmax, limit = jnp.max(jnp.abs(blocks), -1), float(np.finfo(np.float32).max)
    encode = functools.partial(format.encode, blocks, absmax, 32, limit)
    codes, (scales, offsets) = encode(jnp.full_like(blocks, 0.25))
    expected_codes, (expected_scales, expected_offsets) = encode()
    assert np.array_equal(codes, expected_codes)
    np.testing.assert_allclose(scales, expected_scales, rtol=1e-5)
    np.testing.assert_allclose(offsets, expected_offsets, rtol=1e-4, atol=1e-6)
