"""Learned scales."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Binary, Int2, Int8, Ternary
from helpers import assert_identical


def lsq_reference(w, s, top, block, binary=False):
    """Return the value and the derivatives for weights and scales in float64.

    Equations 1, 2, 3 and 5 of arXiv 1902.08153.
    """
    w, s = np.asarray(w, np.float64), np.repeat(np.asarray(s, np.float64), block, -1)
    ratio = w / s
    levels = np.round(np.clip(ratio, -top, top))
    if binary:
        levels = np.where(w < 0, -1.0, 1.0)
    inside = np.abs(ratio) < top
    return levels * s, inside.astype(float), np.where(inside, levels - ratio, levels)


@pytest.mark.parametrize(
    "make,top,block",
    [(Int8, 127, None), (Int8, 127, 8), (Ternary, 1, 8), (Binary, 1, None)],
)
def test_learned_scales_are_those_of_the_paper(normal, make, top, block):
    format = make(block_size=block)
    weight, ct = normal(6, 40), normal(6, 40)
    start = eqquant.training.initial_scales(weight, format)
    size = block or 40
    mean = np.abs(weight).reshape(6, -1, size).mean(-1)
    np.testing.assert_allclose(start, 2 * mean / np.sqrt(top), rtol=1e-5)
    scales = start * 0.7  # Large enough for clipping.

    value, by_weight, by_scale = lsq_reference(
        weight, scales, top, size, make is Binary
    )
    through = jax.jit(lambda w, s: eqquant.straight_through(w, format, scales=s))
    out, pull = jax.vjp(through, weight, scales)
    np.testing.assert_allclose(out, value, rtol=1e-6)
    of_weight, of_scales = pull(ct)
    np.testing.assert_allclose(of_weight, ct * by_weight, rtol=1e-6)
    summed = (np.asarray(ct, np.float64) * by_scale).reshape(6, -1, size).sum(-1)
    # The float32 error of `level - ratio` is about 1e-7 of the ratio, which is at most
    # 127.
    expected = summed / np.sqrt(size * top)
    np.testing.assert_allclose(of_scales, expected, rtol=1e-4, atol=1e-4)
    # The value equals the stored value.
    stored = eqquant.quantize(weight, format, scales=scales)
    assert_identical(stored.scales, scales)
    assert_identical(through(weight, scales), stored.dequantize())


def test_learned_offsets_follow_the_paper(normal):
    """Compare with the equations of arXiv 2004.09576 in float64, for levels -2 to 1."""
    format = Int2(affine=True, block_size=8, scale_dtype="float32")
    weight, ct = normal(6, 40), normal(6, 40)
    q = eqquant.quantize(weight, format)
    scales, offsets = q.scales * 0.7, q.offsets + 0.1  # So that something is cut off.
    through = jax.jit(
        lambda w, s, o: eqquant.straight_through(w, format, scales=s, offsets=o)
    )
    out, pull = jax.vjp(through, weight, scales, offsets)
    each, middle = (np.repeat(np.float64(x), 8, -1) for x in (scales, offsets))
    ratio = (np.float64(weight) - middle) / each
    levels = np.round(np.clip(ratio, -2, 1))
    np.testing.assert_allclose(out, levels * each + middle, rtol=1e-5, atol=1e-6)
    inside = (ratio > -2) & (ratio < 1)
    assert 0 < inside.mean() < 1
    of_weight, of_scales, of_offsets = pull(ct)
    np.testing.assert_allclose(of_weight, ct * inside, rtol=1e-6)
    summed = lambda x: (ct * x).reshape(6, 5, 8).sum(-1) / np.sqrt(8)
    expected = summed(np.where(inside, levels - ratio, levels))
    np.testing.assert_allclose(of_scales, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_offsets, summed(~inside), rtol=1e-5, atol=1e-6)
    stored = eqquant.quantize(weight, format, scales=scales, offsets=offsets)
    assert_identical(through(weight, scales, offsets), stored.dequantize())


def test_a_model_learns_offsets(normal):
    layer = eqx.nn.Linear(40, 6, key=jax.random.key(0))
    format = Int2(affine=True, block_size=8)
    model = eqquant.FakeQuantized(layer, format, learn_scales=True, min_size=1)
    start = eqquant.quantize(layer.weight, format)
    assert_identical((model.scales, model.offsets), ((start.scales,), (start.offsets,)))
    assert_identical(model.quantized().weight, start)
    model = eqx.tree_at(lambda m: m.offsets[0], model, start.offsets + 0.125)
    assert (model.quantized().weight.offsets == start.offsets + 0.125).all()
    with pytest.raises(ValueError, match="initial_scales: format must have no offsets"):
        eqquant.training.initial_scales(layer.weight, format)


def test_one_learned_scale_for_an_array(normal):
    weight = normal(6, 40)
    scale = eqquant.training.initial_scales(weight, "ternary", axis=(0, 1))
    assert scale.shape == (1,)
    through = lambda s: jnp.sum(
        eqquant.straight_through(weight, "ternary", axis=(0, 1), scales=s) ** 2
    )
    gradient = jax.grad(through)(scale)
    assert gradient.shape == (1,) and gradient != 0
    q = eqquant.quantize(weight, "ternary", axis=(0, 1), scales=scale)
    assert (q.scales == scale).all()


def test_learned_scales_of_stacked_weights(normal):
    weight = normal(3, 6, 40)
    scales = jax.jit(jax.vmap(lambda w: eqquant.training.initial_scales(w, "int8")))(
        weight
    )
    loss = lambda w, s: jnp.sum(eqquant.straight_through(w, "int8", scales=s) ** 2)
    one_by_one = jax.jit(jax.vmap(jax.grad(loss, 1)))(weight, scales)
    # The gradient scale depends on the number of values per scale.
    at_once = jax.jit(jax.grad(loss, 1))(weight, scales)
    np.testing.assert_allclose(at_once, one_by_one, rtol=1e-5)


def test_a_block_of_zeros_can_learn():
    weight = jnp.ones((2, 64)).at[0].set(0)
    assert (eqquant.training.initial_scales(weight, "int8") > 0).all()
    assert (eqquant.training.initial_scales(weight * 0, "int8") > 0).all()


def test_learning_a_scale_lowers_the_error(normal):
    """Gradient descent with the paper's gradient reduces the error."""
    weight = normal(8, 256)
    scales = eqquant.training.initial_scales(weight, "ternary") * 2

    @jax.jit
    def error(scales):
        out = eqquant.straight_through(weight, "ternary", scales=scales)
        return jnp.mean((out - weight) ** 2)

    before, descend = error(scales), jax.jit(jax.grad(error))
    for _ in range(200):
        scales = scales - 100.0 * descend(scales)
    # The least possible error of ternary values on a normal distribution is 0.19.
    assert error(scales) < 0.21 < before
