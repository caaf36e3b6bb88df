"""INT4: stored codes and scales against NumPy, and negative scales from files."""

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
from eqquant import Int4
from helpers import (
    assert_identical,
    in_blocks,
    pairs,
    relative,
    slow,
    strict,
    TOLERANCE,
    unpacked,
)


decode = jax.jit(eqquant.dequantize)


@pairs("block_size, dtype", [None, 32, slow(64)], ["float32", "bfloat16"])
def test_against_numpy_in_float64(block_size, dtype, normal):
    w = normal(32, 256, dtype=dtype)
    q = eqquant.quantize(w, Int4(block_size=block_size))
    blocks = in_blocks(w, block_size)
    absmax = np.abs(blocks).max(-1)
    scales = (absmax / np.where(blocks.max(-1) == absmax, -8, 8)).astype(np.float32)
    assert_identical(q.scales, scales)
    quotient = blocks / scales[..., None].astype(np.float64)
    levels = unpacked(q).astype(int).reshape(blocks.shape) - 8
    # The quotient, at most 8, is rounded to float32 and then to an integer.
    near_half = np.abs(np.abs(quotient - np.trunc(quotient)) - 0.5) < 8 * 2.0**-24
    expected = np.clip(np.round(quotient), -8, 7)
    assert (levels == expected)[~near_half].all() and near_half.mean() < 0.01


def test_the_sign_of_the_largest_value_decides_that_of_the_scale():
    rows = [[8.0, -4.0], [-8.0, 4.0], [8.0, -8.0], [0.0, -0.0]]
    q = eqquant.quantize(jnp.array(rows), Int4(block_size=2))
    np.testing.assert_array_equal(q.scales[:, 0], np.array([-1, 1, -1, 0], np.float32))
    assert unpacked(q).tolist() == [[0, 12], [0, 12], [0, 15], [8, 8]]


def test_a_value_above_the_highest_level_takes_it():
    w = jnp.array([[-8.0, 7.9, 7.4, 6.5]])
    q = eqquant.quantize(w, Int4(block_size=4))
    assert q.dequantize().tolist() == [[-8, 7, 7, 6]]


def test_quantizing_what_it_decoded_changes_nothing_for_any_scale(rng):
    # `7 * scale` is rounded, `8 * scale` never.
    w = rng.uniform(-2, 2, (2**14, 4)).astype(np.float32)
    q = eqquant.quantize(w, Int4(block_size=None))
    assert_identical(eqquant.quantize(decode(q), q.format), q)


def test_bytes_are_those_of_the_documented_layout():
    w = jnp.arange(-8.0, 8.0).reshape(1, 16)  # Every level, with scale 1.
    codes = eqquant.quantize(w, Int4(block_size=16)).codes[0]
    assert codes.tolist() == [low | (low + 8) << 4 for low in range(8)]


def negative(normal, block_size):
    """Return an array with scales of both signs, like GGUF's Q4_0, and its values."""
    q = eqquant.quantize(normal(24, 128), Int4(block_size=block_size))
    signs = np.resize([1.0, -1.0, -1.0], q.scales.shape).astype(np.float32)
    q = q.replace(scales=q.scales * signs)
    blocks = unpacked(q).astype(np.float64).reshape(*q.scales.shape, -1) - 8
    dense = (blocks * np.asarray(q.scales)[..., None]).reshape(24, 128)
    return q, dense


@pairs("precision, block_size, m", TOLERANCE, [None, 32], [3, 40, slow(300)])
def test_negative_scales_in_products(precision, block_size, m, normal):
    q, dense = negative(normal, block_size)
    np.testing.assert_array_equal(decode(q), dense.astype(np.float32))
    x, y = normal(m, 128), normal(m, 24)
    dot = jax.jit(strict(lambda x, q: jax.lax.dot(x, q, precision=precision)))
    assert relative(dot(x, q.T), np.float64(x) @ dense.T) < TOLERANCE[precision]
    assert relative(dot(y, q), np.float64(y) @ dense) < TOLERANCE[precision]


def test_negative_scales_elsewhere(normal):
    q, dense = negative(normal, 32)
    dense = dense.astype(np.float32)
    np.testing.assert_array_equal(decode(-q), -dense)
    np.testing.assert_array_equal(decode(q[3:5]), dense[3:5])
    np.testing.assert_array_equal(decode(q[:, 32:64]), dense[:, 32:64])
    np.testing.assert_array_equal(q[7], dense[7])
    halved = q * 0.5
    np.testing.assert_array_equal(decode(halved), dense / 2)
    x = normal(128)
    by_scale = jax.grad(lambda s: jnp.sum(jnp.sin(q.replace(scales=s) @ x)))(q.scales)
    levels = (unpacked(q).astype(np.float64) - 8).reshape(24, 4, 32)
    inner = (levels * np.float64(x).reshape(4, 32)).sum(-1)
    expected = np.cos(dense.astype(np.float64) @ np.float64(x))[:, None] * inner
    # The cosine amplifies rounding errors ten times.
    assert relative(by_scale, expected) < 10 * TOLERANCE["high"]


def test_clipping_and_learning_know_that_seven_is_the_highest(normal):
    w = jnp.array([[-8.0, 7.5, 6.5, 7.0, 0, 0, 0, 0]])
    format = Int4(block_size=8)
    clipped = jax.grad(lambda w: eqquant.straight_through(w, format, clip=True).sum())(
        w
    )
    assert clipped.tolist() == [[1, 0, 1, 1, 1, 1, 1, 1]]
    scales = jnp.array([[1.0]])
    by_scale = jax.grad(lambda s: eqquant.straight_through(w, format, scales=s).sum())(
        scales
    )
    # Equation 3 of arXiv 1902.08153: -8 and 7 (twice) outside of the levels, and 6 -
    # 6.5 between them, times the gradient scale with highest level 7.
    assert np.allclose(by_scale, (-8 + 7 + 7 - 0.5) / np.sqrt(8 * 7), rtol=1e-6)
    start = eqquant.training.initial_scales(w, format)
    assert np.allclose(start, 2 * np.abs(w).mean() / np.sqrt(7), rtol=1e-6)
