"""Test `tune_rounding`, by levels, errors of outputs, and an exhaustive search."""

import itertools

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Int3, Int8, NF4, Ternary
from eqquant.training import tune_rounding
from helpers import assert_identical, relative


MLP = eqx.nn.MLP(64, 48, 96, 1, key=jax.random.key(0))


def forward(model, x):
    return jax.vmap(model)(x)


@pytest.fixture
def batches(normal):
    """Inputs of few directions, and the outputs of the float model."""
    mixing = normal(16, 64)
    inputs = [normal(64, 16) @ mixing + 0.1 * normal(64, 64) for _ in range(3)]
    return [(x, forward(MLP, x)) for x in inputs]


@pytest.mark.parametrize(
    "format, options",
    [
        (Int3(), {}),
        (NF4(), {"rotate": True}),
        (NF4(double_quantization=True), {}),
        (Int8(), {}),
        (Ternary(), {}),
    ],
)
def test_outputs_are_closer_with_neighbouring_levels(format, options, batches):
    nearest = eqquant.quantize_tree(MLP, format, **options)
    *seen, (x, expected) = batches
    tuned = tune_rounding(nearest, MLP, forward, seen, steps=60)
    error = lambda m: relative(forward(eqquant.dequantize_tree(m), x), expected)
    assert error(tuned) < 0.9 * error(nearest)
    for old, new in zip(nearest.layers, tuned.layers, strict=True):
        assert_identical(old.bias, new.bias)
        old, new = (getattr(w, "base", w) for w in (old.weight, new.weight))
        assert_identical(old.scales, new.scales)
        _are_neighbours(old, new)


def _are_neighbours(old, new):
    """Check that weights move by one level at most, and some move."""
    levels = [
        q.format.levels(q.format.states(q.codes), jnp.float32) for q in (old, new)
    ]
    table = jnp.unique(levels[0])
    distance = jnp.abs(jnp.subtract(*(jnp.searchsorted(table, x) for x in levels)))
    assert distance.mean() > 0 and distance.max() <= 1


def test_rows_are_close_to_the_best(rng):
    w = jnp.asarray(rng.uniform(-3, 3, (16, 8)), jnp.float32)
    # The scale is 1, so both neighbours are integers.
    q = eqquant.arrays.from_components(
        jnp.zeros((16, 8), jnp.int8), jnp.ones((16, 1)), Int8(), dtype="float32"
    )
    x = jnp.asarray(rng.standard_normal((3, 8)) + 2, jnp.float32)
    product = lambda w, x: x @ w.T
    tuned = tune_rounding(q, w, product, [(x, x @ w.T)], steps=100, rate=0.02)
    exact = np.asarray(w, np.float64)

    def errors(values):
        products = (np.float64(values) - exact) @ np.asarray(x, np.float64).T
        return np.sum(products**2, -1)

    ups = np.array(list(itertools.product([0, 1], repeat=8)))
    best = np.min([errors(np.floor(exact) + up) for up in ups], 0)
    found = errors(tuned.dequantize())
    assert (found > best - 1e-4).all()  # No other level was chosen.
    assert found.sum() < 0.8 * errors(np.round(exact)).sum()


def test_the_result_is_never_worse(batches):
    nearest = eqquant.quantize_tree(MLP, "nf4")
    exact = eqquant.dequantize_tree(nearest)
    expected = [(x, forward(exact, x)) for x, _ in batches]
    same = tune_rounding(nearest, MLP, forward, expected, steps=3, rate=0.5)
    assert eqx.tree_equal(same, nearest)


@pytest.mark.slow
def test_stacks_of_layers_and_several_outputs(normal):
    w, x = normal(3, 24, 64), normal(32, 64)
    product = lambda w, x: {"a": x @ w[0].T, "b": jnp.einsum("nk,bmk->bnm", x, w[1:])}
    q = eqquant.quantize(w, "int3")
    tuned = tune_rounding(q, w, product, [(x, product(w, x))], steps=40)
    assert (tuned.codes != q.codes).any(axis=(1, 2)).all()
    error = lambda q: relative(x @ q.dequantize()[1].T, x @ w[1].T)
    assert error(tuned) < error(q)


@pytest.mark.parametrize(
    "student, options, message",
    [
        (MLP, {}, "no quantized weight.*quantize_tree"),
        (eqquant.quantize_tree(MLP, "nf4"), {"steps": 0}, "steps=0"),
        (eqquant.quantize_tree(MLP, "nf4"), {"rate": float("nan")}, "rate=nan"),
        (
            eqquant.quantize_tree(MLP, eqquant.Int4(affine=True)),
            {},
            r"layers\[0\].weight.*affine=True.*'nf4'",
        ),
    ],
)
def test_bad_input(student, options, message, batches):
    with pytest.raises(ValueError, match=message):
        tune_rounding(student, MLP, forward, batches, **options)


def test_bad_teacher_and_batches(batches):
    student = eqquant.quantize_tree(MLP, "nf4")
    with pytest.raises(ValueError, match=r"no float weight.*layers\[0\].weight"):
        tune_rounding(student, student, forward, batches)
    bad = [(x.at[0, 0].set(jnp.nan), y) for x, y in batches]
    with pytest.raises(ValueError, match="outputs.*nan"):
        tune_rounding(student, MLP, forward, bad, steps=2)
    with pytest.raises(ValueError, match="batches is empty"):
        tune_rounding(student, MLP, forward, [])
    with pytest.raises(TypeError, match="swapped"):
        tune_rounding(forward, MLP, student, batches)
