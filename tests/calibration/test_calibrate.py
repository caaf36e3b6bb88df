"""`calibrate`: exact statistics of inputs, from unchanged model code."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow
from jax import lax


# XLA's float32 sums against float64 sums.
EXACT = 1e-6


def gram(x) -> np.ndarray:
    x = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
    return x.T @ x


def assert_exact(actual, expected):
    error = np.max(np.abs(np.asarray(actual, np.float64) - expected))
    assert error <= EXACT * np.max(np.abs(expected))


def rows_of(model, batch):
    return jax.vmap(model)(batch)


def linears(count, size=16):
    keys = jax.random.split(jax.random.key(0), count)
    return eqx.filter_vmap(lambda key: eqx.nn.Linear(size, size, key=key))(keys)


def test_it_sums_outer_products_over_batches(normal):
    model = eqx.nn.MLP(16, 16, 16, 1, key=jax.random.key(0))
    batches = [normal(8, 16), 2 * normal(8, 16)]
    stats = eqquant.calibrate(eqx.filter_jit(rows_of), model, iter(batches))
    x = np.concatenate(batches)
    first, second = stats.weights.values()
    assert list(stats.weights) == ["layers.0.weight", "layers.1.weight"]
    assert_exact(first.gram, gram(x))
    layer = model.layers[0]
    w, b = np.asarray(layer.weight, np.float64), np.asarray(layer.bias)
    assert_exact(second.gram, gram(np.maximum(x @ w.T + b, 0)))
    assert first.rows == second.rows == 16 and first.power > 0


def test_stacked_layers_in_a_scan_and_a_checkpoint_are_seen_one_by_one(normal):
    stack, x = linears(3), normal(8, 16)

    def run(stack, x):
        arrays, static = eqx.partition(stack, eqx.is_array)

        @jax.checkpoint
        def body(h, arrays):
            return jnp.tanh(jax.vmap(eqx.combine(arrays, static))(h)), None

        return lax.scan(body, x, arrays)[0]

    (known,) = eqquant.calibrate(run, stack, [x]).weights.values()
    h = np.asarray(x, np.float64)
    for i in range(3):
        assert_exact(known.gram[i], gram(h))
        w, b = np.asarray(stack.weight[i], np.float64), np.asarray(stack.bias[i])
        h = np.tanh(h @ w.T + b)
    assert known.rows.tolist() == [8, 8, 8]


def test_experts_see_what_is_sent_to_them(normal):
    experts, x = linears(2), normal(8, 16)
    chosen = np.arange(8) % 4 == 0

    def mix(experts, x):
        out = eqx.filter_vmap(lambda e: jax.vmap(e)(x))(experts)
        return jnp.where(chosen[:, None], out[0], out[1])

    (known,) = eqquant.calibrate(mix, experts, [x]).weights.values()
    assert_exact(known.gram[0], gram(x[chosen]))
    assert_exact(known.gram[1], gram(x[~chosen]))
    assert known.rows.tolist() == [2, 6]
    (known,) = eqquant.calibrate(mix, experts, [x], every_row=True).weights.values()
    assert_exact(known.gram[0], gram(x))


@pytest.mark.parametrize("shared", [False, slow(True)])
def test_a_stack_in_one_product(shared, normal):
    w, x = normal(3, 4, 16), normal(8, 16)
    xs = x if shared else jnp.stack([x, 2 * x, 3 * x])
    spec = "eoi,bi->beo" if shared else "eoi,ebi->beo"
    fn = eqquant.quaxify(lambda m, x: jnp.einsum(spec, m["w"], x))
    stats = eqquant.calibrate(fn, {"w": w}, [xs], rules={"w": "nf4"})
    for i in range(3):
        seen = stats.weights["w"].gram[i]
        assert_exact(seen, gram(x) * (1 if shared else (i + 1) ** 2))


def test_padding_is_left_out(normal):
    model, x = eqx.nn.Linear(16, 16, key=jax.random.key(0)), normal(8, 16)
    mask = np.arange(8) < 5

    def mean(model, x):
        return jnp.mean(jax.vmap(model)(x), 0, where=mask[:, None])

    known = eqquant.calibrate(mean, model, [x]).weights["weight"]
    assert_exact(known.gram, gram(x[:5]))
    assert known.rows == 5


def test_a_weight_whose_first_axis_is_contracted(normal):
    w, x = normal(16, 4), normal(8, 16)
    rules = {"w": ("nf4", 0)}
    stats = eqquant.calibrate(lambda m, x: x @ m["w"], {"w": w}, [x], rules=rules)
    assert_exact(stats.weights["w"].gram, gram(x))


def test_rows_that_are_looked_up(normal):
    table = eqx.nn.Embedding(64, 16, key=jax.random.key(0))
    look_up = lambda table, i: jax.vmap(table)(i)
    known = eqquant.calibrate(look_up, table, [np.arange(6)]).weights["weight"]
    # The results are the rows, so all gradients are 1 or -1.
    assert known.rows == 6 and known.power == 6 * 16
    np.testing.assert_array_equal(np.diagonal(known.gram), 6)


def test_a_convolution(normal):
    layer = eqx.nn.Conv1d(4, 8, 3, key=jax.random.key(0))
    x = normal(2, 4, 10)
    known = eqquant.calibrate(rows_of, layer, [x], min_size=1).weights["weight"]
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(x), 3, -1)
    assert_exact(known.gram, gram(windows.transpose(0, 2, 1, 3).reshape(-1, 12)))


@pytest.mark.slow
def test_an_adapter_is_looked_through(normal):
    model = eqx.nn.Linear(16, 16, key=jax.random.key(0))
    adapted = eqquant.lora_tree(model, 2, key=jax.random.key(1))
    x = normal(8, 16)
    known = eqquant.calibrate(rows_of, adapted, [x]).weights["weight"]
    assert_exact(known.gram, gram(x))


def test_statistics_are_saved_and_loaded(normal, tmp_path):
    model = eqx.nn.Linear(16, 16, key=jax.random.key(0))
    stats = eqquant.calibrate(rows_of, model, [normal(8, 16)])
    eqquant.save(tmp_path / "stats.safetensors", stats)
    loaded = eqquant.load(tmp_path / "stats.safetensors", like=stats)
    assert eqx.tree_equal(stats, loaded)


#
# Errors
#


def test_bad_data(normal):
    model, x = eqx.nn.Linear(16, 16, key=jax.random.key(0)), normal(8, 16)
    with pytest.raises(ValueError, match="batches must have at least one"):
        eqquant.calibrate(rows_of, model, [])
    with pytest.raises(ValueError, match=r"batch 1 has .*\['weight'\]"):
        eqquant.calibrate(rows_of, model, [x, x.at[0, 0].set(jnp.nan)])
    with pytest.raises(ValueError, match="fn must return floating-point arrays"):
        eqquant.calibrate(lambda model, x: jnp.argmax(model(x[0])), model, [x])
    with pytest.raises(ValueError, match="no weight is chosen"):
        eqquant.calibrate(rows_of, model, [x], min_size=10**6)


def test_a_weight_that_is_not_reached_is_named(normal):
    model = {"used": linears(1), "left": linears(1)}
    fn = lambda model, x: eqx.filter_vmap(lambda m: jax.vmap(m)(x))(model["used"])
    with pytest.warns(UserWarning, match=r"never reached \['left.weight'\]"):
        stats = eqquant.calibrate(fn, model, [normal(8, 16)])
    with pytest.warns(UserWarning, match=r"\['left.weight'\].*rounded plainly"):
        q = eqquant.quantize_tree(model, "int8", calibration=stats)
    assert q["left"].weight.format == eqquant.Int8()


def test_statistics_of_another_model(normal):
    model = eqx.nn.Linear(16, 16, key=jax.random.key(0))
    stats = eqquant.calibrate(rows_of, model, [normal(8, 16)])
    other = eqx.nn.Linear(16, 32, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"'weight' it has the shape \(16, 16\)"):
        eqquant.quantize_tree(other, calibration=stats)
    with pytest.raises(ValueError, match="has 'weight', which the model lacks"):
        eqquant.quantize_tree({"layer": model}, calibration=stats)
    with pytest.raises(ValueError, match="method must be one of"):
        eqquant.quantize_tree(model, calibration=stats, method="magic")
    with pytest.raises(ValueError, match="requires original"):
        eqquant.report(model, calibration=stats)


@pytest.mark.parametrize(
    "product",
    [
        lambda w, x: x @ jnp.swapaxes(w, 0, 1),
        lambda w, x: jnp.einsum("boi,ni->nbo", w[None], x),
        lambda w, x: jnp.einsum("obi,ni->nbo", w.reshape(12, 1, 16), x),
    ],
    ids=["transposed", "one more", "one within"],
)
def test_axes_may_move_before_a_product(product, normal):
    x = normal(8, 16)
    fn = eqquant.quaxify(lambda m, x: product(m["w"], x))
    rules = {"w": eqquant.trees.QuantizationRule("nf4", axis=-1)}
    stats = eqquant.calibrate(fn, {"w": normal(12, 16)}, [x], rules=rules)
    assert_exact(stats.weights["w"].gram, gram(x))
