"""Ternary digits, five in a byte."""

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Ternary
from eqquant.formats import DenseTernary
from eqquant.formats._pack import DIGIT, num_bytes, num_codes, pack, unpack
from eqquant.kernels.cpu import _choose
from helpers import assert_identical, relative, strict, TOLERANCE


def digits_of(group: np.ndarray) -> np.ndarray:
    """Return the digits of a group of bytes, by the documented layout."""
    size = len(group) // 13 * 16
    planes = [[] for _ in range(4)]
    fifth = []
    for byte in group.tolist():
        fraction, five = byte, []
        for _ in range(5):
            five.append(3 * fraction // 256)
            fraction = 3 * fraction % 256
        for plane, digit in zip(planes, five[:4], strict=True):
            plane.append(digit)
        fifth.append(five[4])
    rest = size - len(group)
    return np.concatenate(
        [[*plane, *fifth[i * rest :][:rest]] for i, plane in enumerate(planes)]
    )


@pytest.mark.parametrize("group", [64, 128, 256, 192])
def test_packing(group, rng):
    codes = rng.integers(0, 3, (6, group)).astype(np.uint8)
    packed = pack(codes, DIGIT)
    assert packed.shape == (6, num_bytes(group, DIGIT)) == (6, group * 13 // 64)
    assert num_codes(packed.shape[-1], DIGIT) == group
    assert (np.asarray(pack(jnp.asarray(codes), DIGIT)) == packed).all()
    assert (np.asarray([digits_of(row) for row in packed]) == codes).all()
    rows = jnp.asarray(packed.reshape(2, -1))
    assert (np.asarray(unpack(rows, DIGIT, group)) == codes.reshape(2, -1)).all()


def test_every_byte_has_digits(rng):
    """Other libraries may write bytes that `pack` does not."""
    packed = rng.permutation(np.arange(26 * 10) % 256).astype(np.uint8).reshape(10, 26)
    found = np.asarray(unpack(jnp.asarray(packed), DIGIT, 128))
    assert (found == [digits_of(row) for row in packed]).all()
    again = np.asarray(unpack(jnp.asarray(pack(found, DIGIT)), DIGIT, 128))
    assert (again == found).all() and found.max() == 2


@pytest.mark.parametrize("rule", ["threshold", "absmean"])
def test_values_equal_ternary(rule, normal):
    """With a partial last block."""
    w = normal(6, 320)
    q = eqquant.quantize(w, DenseTernary(rule=rule))
    other = eqquant.quantize(w, Ternary(256, "float16", rule=rule))
    assert_identical(q.dequantize(), other.dequantize())
    assert q.codes.shape == (6, 2 * 52)
    assert_identical(eqquant.quantize(q.dequantize(), q.format), q)


@pytest.mark.parametrize("block", [256, 64, None])
@pytest.mark.parametrize("kernels", ["native", "XLA"])
def test_products(block, kernels, normal, monkeypatch):
    if kernels == "XLA":
        monkeypatch.setattr(_choose, "load", lambda: "there are none in this test")
    q = eqquant.quantize(normal(40, 512), DenseTernary(block))
    dense = np.asarray(q.dequantize(), np.float64)
    for rows in (1, 20):
        x, y = normal(rows, 512), normal(rows, 40)
        forward, backward = jax.jit(strict(lambda x, y, q: (x @ q.T, y @ q)))(x, y, q)
        assert relative(forward, x @ dense.T) < TOLERANCE["high"]
        assert relative(backward, y @ dense) < TOLERANCE["high"]


def test_structure(normal):
    q = eqquant.quantize(normal(3, 8, 512), DenseTernary())
    dense = q.dequantize()
    for index in (1, (slice(None), slice(2, 5)), (..., slice(256, 512))):
        part = q[index]
        assert eqquant.is_quantized(part)
        assert_identical(part.dequantize(), dense[index])


def test_checkpoints(normal, tmp_path):
    q = eqquant.quantize(normal(8, 512), DenseTernary())
    eqquant.save(tmp_path / "q.safetensors", {"w": q})
    found = eqquant.load(tmp_path / "q.safetensors", {"w": q})
    assert found["w"].format == q.format
    assert_identical(found["w"], q)


def test_block_sizes():
    with pytest.raises(
        ValueError, match="block_size must be a positive multiple of 64"
    ):
        DenseTernary(96)
