"""Scales that are integers times a float16 for each 256 weights (K-quants)."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Int2, Int3, Int4
from eqquant.formats import Codebook, FourBitScales, Int5, Int6, IntegerScales
from helpers import assert_identical, relative, slow, sqnr, strict, unpacked


K = {"double_quantization": "k"}
AFFINE = {"affine": True, "unsigned": True, **K}
LEVELS = tuple(range(-8, 8))
# The formats of Q2_K, Q3_K, Q4_K, Q5_K, Q6_K and IQ4_XS, and their bits per weight.
BITS = {
    Int2(16, **AFFINE): 2.625,
    Int3(16, **K): 3.5625,
    Int4(32, **AFFINE): 4.625,
    Int5(32, **AFFINE): 5.625,
    Int6(16, **K): 6.5625,
    Codebook(LEVELS, 32, **K): 4.3125,
}
FAST = (Int2(16, **AFFINE), Int6(16, **K))
FORMATS = [format if format in FAST else slow(format) for format in BITS]


@pytest.fixture(params=FORMATS, ids=repr)
def q(request, normal):
    return eqquant.quantize(normal(24, 512) + 0.2, request.param)


def decoded(scales):
    """Decode scales by their definition."""
    codes = np.asarray(scales.codes)
    if isinstance(scales, FourBitScales):
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    units = np.float64(scales.units)
    return codes * units.repeat(codes.shape[-1] // units.shape[-1], -1)


def dense(q):
    levels = np.asarray(q.format.table, np.float64)[unpacked(q).astype(int)]
    levels = levels.reshape(*q.scales.shape, -1) * decoded(q.scales)[..., None]
    if q.offsets is not None:
        levels = levels + decoded(q.offsets)[..., None]
    return levels.reshape(q.shape)


def test_values_and_bits(q):
    kind = FourBitScales if q.format.bits == 2 else IntegerScales
    assert type(q.scales) is kind and q.scales.units.shape == (24, 2)
    assert 8 * q.nbytes / q.size == BITS[q.format]
    assert q.nbytes == 24 * (512 * q.format.bits // 8 + q.format.scale_bytes(512))
    np.testing.assert_allclose(q.dequantize(), dense(q), rtol=2e-7, atol=1e-7)


def test_products(q, normal):
    x, y, w = normal(5, 512), normal(5, 24), dense(q)
    multiply = jax.jit(strict(jnp.matmul))
    assert relative(multiply(x, q.T), np.float64(x) @ w.T) < 1e-4
    assert relative(multiply(y, q), np.float64(y) @ w) < 1e-4


def test_structure(q):
    w = q.dequantize()
    assert_identical(q[:, 256:].dequantize(), w[:, 256:])
    assert isinstance(q[:, :64], eqquant.QuantizedArray)
    assert_identical(q[:, :64].dequantize(), w[:, :64])
    assert_identical(q[:, :64][:, 32:].dequantize(), w[:, 32:64])
    assert_identical(q[3:7].T.dequantize(), w[3:7].T)
    assert_identical(q[5], w[5])
    rows = eqquant.quaxify(lambda q, i: jnp.take(q, i, axis=0))(q, jnp.array([3, 30]))
    assert jnp.isnan(rows[1]).all() and (rows[0] == w[3]).all()
    stacked = eqx.filter_vmap(lambda w: eqquant.quantize(w, q.format))(w[:4, None])
    assert stacked.scales.codes.shape[:2] == stacked.scales.units.shape[:2] == (4, 1)
    joined = strict(lambda *parts: jnp.concatenate(parts))(q, q)
    assert_identical(joined.dequantize(), jnp.concatenate([w, w]))


def test_files(q, tmp_path):
    eqquant.save(tmp_path / "q.safetensors", q)
    assert_identical(eqquant.load(tmp_path / "q.safetensors", q), q)


@pytest.mark.parametrize("size", [300, 16, 256])
@pytest.mark.parametrize("format", FAST, ids=repr)
def test_partial_groups(size, format, normal):
    w = normal(3, size)
    q = eqquant.quantize(w, format)
    assert q.shape == w.shape and q.scales.units.shape == (3, -(-size // 256))
    least = {2: 9, 6: 32}[format.bits]
    assert sqnr(w, q.dequantize()) > least
    again = eqquant.arrays.from_components(
        q.codes, q.scales, format, size=size, offsets=q.offsets
    )
    assert_identical(again, q)


def test_offsets_are_not_positive(normal):
    w = jnp.abs(normal(4, 512)) + 1
    q = eqquant.quantize(w, Int4(32, fit="search", **AFFINE))
    assert (q.offsets.astype("float32") <= 0).all()
    assert relative(q.dequantize(), w) < 0.06
    below = eqquant.quantize(-w, Int4(32, **AFFINE))
    assert (below.offsets.astype("float32") < 0).all()
    assert (below.offsets.units < 0).all() and (below.scales.units > 0).all()


def test_wrong_arguments(normal):
    with pytest.raises(ValueError, match="block_size must be one of .256, 128"):
        Int6(512, **K)
    with pytest.raises(ValueError, match="unsigned must be True with affine"):
        eqquant.quantize(normal(4, 256), Int4(32, affine=True, **K))
    with pytest.raises(ValueError, match="cannot hold"):
        eqquant.quantize(normal(4, 256) * 1e6, Int6(16, **K))
    q = eqquant.quantize(normal(4, 512), Int6(16, **K))
    for units in (q.scales.units[:, :0], jnp.zeros((4, 5), jnp.float16)):
        wrong = IntegerScales(q.scales.codes, units)
        with pytest.raises(ValueError, match="units of IntegerScales must be float16"):
            eqquant.arrays.from_components(q.codes, wrong, q.format)
    wrong = IntegerScales(q.scales.codes.astype("uint8"), q.scales.units)
    with pytest.raises(TypeError, match="parts of scales must be .*int8"):
        eqquant.arrays.from_components(q.codes, wrong, q.format)
