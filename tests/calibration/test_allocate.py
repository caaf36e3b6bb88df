"""`allocate`: the best assignment under a budget."""

import itertools

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.calibration._allocate import _chosen
from eqquant.calibration._options import Option, Options


FORMATS = ["binary", "ternary", "nf4", "int8"]


def calibrated():
    model = eqx.nn.MLP(
        64, 64, 64, 2, use_bias=False, use_final_bias=False, key=jax.random.key(0)
    )
    # The last layer is most sensitive, because its products are the results.
    x = jax.random.normal(jax.random.key(1), (128, 64))
    stats = eqquant.calibrate(lambda model, x: jax.vmap(model)(x), model, [x])
    return model, stats


def test_budgets():
    model, stats = calibrated()
    smallest = 3 * (64 * 8 + 64 * 4)
    losses = []
    for budget in (smallest, 6000, 10**6):
        rules = eqquant.allocate(model, budget, FORMATS, stats)
        q = eqquant.quantize_tree(model, None, rules=rules)
        assert eqquant.trees.nbytes(q) == rules.nbytes <= budget
        losses.append(rules.loss)
        assert rules == eqquant.allocate(model, budget, FORMATS[::-1], stats)
        assert rules == rules.within(10**6).within(budget)
    assert losses == sorted(losses, reverse=True)
    assert {row.format.name for row in rules.rows} == {"int8"}
    assert "share of loss" in str(rules) and f"{rules.nbytes:,} bytes" in str(rules)
    with pytest.raises(ValueError, match=f"at least {smallest:,} bytes"):
        eqquant.allocate(model, smallest - 1, FORMATS, stats)
    with pytest.raises(ValueError, match="at least one format"):
        eqquant.allocate(model, smallest, [], stats)
    with pytest.raises(ValueError, match="method must be one of"):
        eqquant.allocate(model, smallest, FORMATS, stats, method="best")
    with pytest.raises(KeyError):
        rules["nothing"]


def test_the_frontier_goes_through_what_is_chosen():
    model, stats = calibrated()
    rules = eqquant.allocate(model, 5000, FORMATS, stats)
    nbytes, losses = map(list, zip(*rules.frontier, strict=True))
    assert nbytes == sorted(nbytes) and losses == sorted(losses, reverse=True)
    # Convex, because formats come in order of gain.
    gains = np.diff(losses) / np.diff(nbytes)
    assert np.all(np.diff(gains) >= -1e-9 * abs(gains[0]))
    bound = min(loss for size, loss in rules.frontier if size <= 5000)
    assert rules.loss <= bound * (1 + 1e-9)
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = rules.plot(figure.subplots())
    assert axes.get_xlabel() == "MB" and len(axes.lines) == 3


def test_a_large_step_takes_the_place_of_small_ones():
    # In order of gain per byte, small weights come first, and the table then does not
    # fit.
    def weight(path, size, before, after):
        formats = (eqquant.NF4(), size // 2, before), (eqquant.Int8(), size, after)
        hull = tuple(Option(*option) for option in formats)
        return Options(path, size, -1, hull)

    names = ["a", "b", "c"]
    options = (
        weight("table", 1000, 10.0, 1.0),
        *(weight(x, 100, 2.0, 0.9) for x in names),
    )
    smallest = 500 + 3 * 50
    chosen = _chosen(options, 0, smallest + 560)
    assert chosen["table"] == (eqquant.Int8(), -1) and chosen.nbytes == smallest + 550
    assert chosen.loss == pytest.approx(1 + 0.9 + 2 * 2)
    assert chosen.within(smallest + 499)["table"] == (eqquant.NF4(), -1)
    assert chosen.within(smallest + 650).loss == pytest.approx(1 + 3 * 0.9)


@pytest.mark.parametrize(
    "rotate, format",
    [
        (True, "nf4"),
        pytest.param(False, eqquant.NF3(block_size=32), marks=pytest.mark.slow),
    ],
)
def test_what_gptq_is_expected_to_leave(rotate, format):
    model = eqx.nn.Linear(64, 256, key=jax.random.key(0))
    mixed = jax.random.normal(jax.random.key(2), (64, 64)) / 8
    x = jax.random.normal(jax.random.key(1), (512, 64)) @ (mixed + jnp.eye(64) / 4)
    stats = eqquant.calibrate(lambda model, x: jax.vmap(model)(x), model, [x])
    how = {"rotate": rotate}
    expected = jax.vmap(model)(x)
    rules = eqquant.allocate(model, 10**6, [format], stats, **how)
    q = eqquant.quantize_tree(model, format, calibration=stats, **how)
    actual = float(np.sum((jax.vmap(q)(x) - expected) ** 2))
    plain = eqquant.allocate(model, 10**6, [format], stats, method="nearest", **how)
    assert 0.8 < rules.loss / actual < 1.3
    assert rules.loss < 0.8 * plain.loss


@pytest.mark.slow
def test_no_assignment_of_as_many_bytes_is_better():
    model, stats = calibrated()
    options = {}  # The loss of each weight in each format.
    for name in FORMATS:
        rules = eqquant.allocate(model, 10**6, [name], stats)
        for row in rules.rows:
            options.setdefault(row.path, []).append((row.nbytes, row.loss))
    for budget in (4000, 5500, 8000):
        rules = eqquant.allocate(model, budget, FORMATS, stats)
        loss = rules.loss
        for chosen in itertools.product(*options.values()):
            if sum(nbytes for nbytes, _ in chosen) <= rules.nbytes:
                assert sum(lost for _, lost in chosen) >= loss * (1 - 1e-9)


@pytest.mark.slow
def test_the_expected_loss_is_about_that_of_the_results():
    model, stats = calibrated()
    x = jax.random.normal(jax.random.key(1), (128, 64))
    expected = jax.vmap(model)(x)
    for path in stats.weights:
        q = eqquant.quantize_tree(model, None, rules={path: "ternary"})
        actual = float(np.sum((jax.vmap(q)(x) - expected) ** 2))
        rounded = eqquant.allocate(model, 10**6, ["ternary"], stats, method="nearest")
        (row,) = (row for row in rounded.rows if row.path == path)
        assert 0.5 < row.loss / actual < 2
