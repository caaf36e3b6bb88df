"""FP8, MXFP4 and NVFP4, against `ml_dtypes` and the rules of their specifications."""

import eqquant
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from eqquant import FP8, MXFP4, NVFP4
from eqquant.formats._fp8 import from_float8, to_float8
from helpers import assert_identical, in_blocks, pairs, relative, sqnr, strict, unpacked


E2M1 = ml_dtypes.float4_e2m1fn
KINDS = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_of_eight_bits(kind):
    codes = np.arange(256, dtype=np.uint8)
    used = ~np.isin(codes, FP8(kind=kind).unused_codes)
    expected = codes.view(KINDS[kind]).astype(np.float32)
    assert (np.isfinite(expected) == used).all()
    assert_identical(from_float8(jnp.asarray(codes[used]), kind), expected[used])
    assert_identical(to_float8(jnp.asarray(expected[used]), kind), codes[used])


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_to_eight_bits(kind, rng):
    codes = np.arange(FP8(kind=kind).unused_codes[0], dtype=np.uint8)
    levels = codes.view(KINDS[kind]).astype(np.float32)
    ties = (levels[1:] + levels[:-1]) / 2  # Exact.
    near = [ties, np.nextafter(ties, 0), np.nextafter(ties, 1e6)]
    spread = levels[-1] * 2.0 ** rng.uniform(-20, 0, 2000)
    x = np.concatenate([*near, spread]).astype(np.float32)
    x = np.concatenate([x, -x])
    expected = x.astype(KINDS[kind]).view(np.uint8)
    np.testing.assert_array_equal(to_float8(jnp.asarray(x), kind), expected)
    beyond = to_float8(jnp.float32([1e9, -1e9]), kind)
    assert beyond.tolist() == [codes[-1], codes[-1] + 128]


def test_every_code_of_four_bits():
    expected = np.arange(16, dtype=np.uint8).view(E2M1).astype(np.float32)
    assert_identical(
        MXFP4().levels(jnp.arange(16, dtype=jnp.uint8), "float32"), expected
    )


def test_mxfp4_against_its_specification(normal):
    w = normal(16, 256) * 2.0 ** np.arange(-8, 8)[:, None]
    w = w.at[0, :32].set(0).at[1, :6].set([6, 5, -2.5, 0.25, -0.75, 3.5])
    w = w.at[1, 6:32].set(0)  # Ties, with a scale of one.
    q = eqquant.quantize(w, MXFP4())
    blocks = in_blocks(w, 32)
    absmax = np.abs(blocks).max(-1)
    exponents = np.floor(np.log2(np.where(absmax > 0, absmax, 1))) - 2
    exponents = np.where(absmax > 0, exponents + 127, 0).astype(np.uint8)
    assert_identical(q.scales.exponents, exponents)
    scales = 2.0 ** (exponents.astype(np.float64) - 127)
    unit = np.clip((blocks / scales[..., None]).astype(np.float32), -6, 6)
    codes = unit.astype(E2M1)
    np.testing.assert_array_equal(unpacked(q), codes.view(np.uint8).reshape(16, 256))
    values = codes.astype(np.float64) * scales[..., None]
    np.testing.assert_array_equal(q.dequantize(), values.reshape(16, 256))
    e8m0 = exponents[exponents > 0].view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    assert (scales[exponents > 0] == e8m0).all()
    assert 8 * q.nbytes / q.size == 4.25


def test_nvfp4_against_ml_dtypes(normal):
    w = normal(8, 256).at[0, :16].set(0)
    q = eqquant.quantize(w, NVFP4())
    blocks = in_blocks(w, 16)
    absmax = np.abs(blocks).max(-1)
    units = absmax.max(-1, keepdims=True) / (6 * 448)
    assert relative(q.scales.units, units) < 2.0**-15
    units = np.float64(q.scales.units)
    shares = (absmax / 6 / units).astype(np.float32).astype(KINDS["e4m3fn"])
    np.testing.assert_array_equal(q.scales.codes, shares.view(np.uint8))
    scales = shares.astype(np.float64) * units
    unit = blocks / np.where(scales > 0, scales, 1)[..., None]
    codes = np.clip(unit, -6, 6).astype(np.float32).astype(E2M1)
    assert (unpacked(q) == codes.view(np.uint8).reshape(8, 256)).mean() > 0.999
    stored = (
        unpacked(q).astype(np.uint8).view(E2M1).astype(np.float64).reshape(blocks.shape)
    )
    values = (stored * scales[..., None]).reshape(8, 256)
    np.testing.assert_array_equal(q.dequantize(), values)  # No product is rounded.
    assert q.nbytes == 8 * (128 + 16 + 4)


@pairs("format, m", [FP8(), FP8(kind="e5m2"), MXFP4(), NVFP4()], [3, 40])
def test_products(format, m, normal):
    q = eqquant.quantize(normal(24, 256), format)
    dense, x, y = np.float64(q.dequantize()), normal(m, 256), normal(m, 24)
    multiply = jax.jit(strict(jnp.matmul))
    assert relative(multiply(x, q.T), np.float64(x) @ dense.T) < 1e-4
    assert relative(multiply(y, q), np.float64(y) @ dense) < 1e-4


@pytest.mark.parametrize("format", [FP8(), MXFP4(), NVFP4()], ids=repr)
def test_structure_and_files(format, normal, tmp_path):
    q = eqquant.quantize(normal(6, 256), format)
    dense = q.dequantize()
    assert_identical(eqquant.quantize(dense, format), q)
    assert_identical(q[2:4].dequantize(), dense[2:4])
    assert_identical(q[5], dense[5])
    if format.block_size:
        assert_identical(q[:, 64:128].dequantize(), dense[:, 64:128])
    taken = eqquant.quaxify(lambda q: jnp.take(q, jnp.array([1, 9]), axis=0))(q)
    assert_identical(taken[0], dense[1])
    assert jnp.isnan(taken[1]).all()
    assert_identical(eqquant.arrays.from_components(q.codes, q.scales, format), q)
    eqquant.save(tmp_path / "w.safetensors", q)
    assert_identical(eqquant.load(tmp_path / "w.safetensors", q), q)
    assert q.nbytes == 6 * (256 * format.bits // 8 + format.scale_bytes(256))


@pytest.mark.parametrize(
    "format, decibels",
    [(FP8(), 31.5), (FP8(kind="e5m2"), 25.5), (MXFP4(), 18.6), (NVFP4(), 20.4)],
    ids=repr,
)
@pytest.mark.slow
def test_accuracy(format, decibels, normal):
    w = normal(256, 1024)
    values = eqquant.quantize(w, format).dequantize()
    assert sqnr(values, w) == pytest.approx(decibels, abs=0.3)


def test_bad_fields(untyped):
    with pytest.raises(ValueError, match="FP8: kind must be one of .*got 'e3m4'"):
        FP8(kind="e3m4")
    with pytest.raises(ValueError, match="MXFP4: scale_dtype must be float32"):
        MXFP4(scale_dtype="bfloat16")
    with pytest.raises(ValueError, match="NVFP4: block_size must be an integer"):
        NVFP4(block_size=None)
