"""GPTAQ: inputs of a quantized model in `calibrate`, and weights corrected for them."""

import tempfile
import warnings

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow
from jax import lax
from jax.sharding import AxisType


# XLA's float32 sums against float64 sums.
EXACT = 1e-6
SHARE = 0.5


def forward(model, batch):
    return jax.vmap(model)(batch)


def in_a_checkpoint(model, batch):
    return jax.vmap(jax.checkpoint(jax.jit(lambda x: model(x))))(batch)


def mlp(size=32, depth=2):
    return eqx.nn.MLP(size, 10, 2 * size, depth, key=jax.random.key(0))


def inputs_of(model, x) -> list[np.ndarray]:
    """Return the inputs of each layer of an MLP in float64."""
    x, inputs = np.asarray(x, np.float64), []
    for layer in eqquant.dequantize_tree(model).layers:
        inputs.append(x)
        w, b = (np.asarray(a, np.float64) for a in (layer.weight, layer.bias))
        x = np.maximum(x @ w.T + b, 0)
    return inputs


def assert_pair(known, of_float, of_quantized):
    """Compare the statistics of one matrix with sums in float64."""
    gram = of_quantized.T @ of_quantized
    limit = EXACT * np.max(np.abs(gram))
    shift = (of_float - of_quantized).T @ of_quantized
    assert np.max(np.abs(known.gram / known.unit**2 - gram)) <= limit
    assert np.max(np.abs(known.shift / known.unit**2 - shift)) <= limit


@pytest.mark.parametrize("fn", [forward, in_a_checkpoint])
@pytest.mark.parametrize("every_row", [False, True])
def test_the_shift_is_a_sum_over_the_rows_of_both_models(fn, every_row, normal):
    model, batches = mlp(), [normal(16, 32), normal(8, 32)]
    quantized = eqquant.quantize_tree(model, "nf3", rotate=True)
    options = {"every_row": every_row, "gradients_every": None if every_row else 1}
    stats = eqquant.calibrate(fn, model, batches, quantized=quantized, **options)
    x = np.concatenate(batches)
    pairs = zip(inputs_of(model, x), inputs_of(quantized, x), strict=True)
    for known, pair in zip(stats.weights.values(), pairs, strict=True):
        assert_pair(known, *pair)
        assert known.rows == 24
    assert np.any(stats.weights["layers.1.weight"].shift)


def test_stacked_layers_in_a_scan(normal):
    keys = jax.random.split(jax.random.key(0), 3)
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))(keys)
    x = normal(2, 12, 16)

    def run(stack, x):
        arrays, static = eqx.partition(stack, eqx.is_array)

        def body(h, arrays):
            layer = eqx.combine(arrays, static)
            return jnp.tanh(jax.vmap(jax.vmap(layer))(h)), None

        return lax.scan(body, x, arrays)[0]

    quantized = eqquant.quantize_tree(stack, "nf3")
    (known,) = eqquant.calibrate(run, stack, [x], quantized=quantized).weights.values()
    rows = [np.asarray(x, np.float64).reshape(-1, 16)] * 2
    for i in range(3):
        assert_pair(jax.tree.map(lambda part, i=i: part[i], known), *rows)
        for j, one in enumerate((stack, eqquant.dequantize_tree(quantized))):
            w, b = np.asarray(one.weight[i], np.float64), np.asarray(one.bias[i])
            rows[j] = np.tanh(rows[j] @ w.T + b)


def test_experts_in_one_product(normal):
    model = {"first": normal(16, 16), "experts": normal(3, 8, 16)}
    quantized = eqquant.quantize_tree(model, "nf3", rules={"*": "nf3"})

    def run(model, x):
        h = jnp.tanh(jnp.einsum("oi,bi->bo", model["first"], x))
        return jnp.einsum("eoi,bi->beo", model["experts"], h)

    fn, x = eqquant.quaxify(run), normal(24, 16)
    options = {"rules": {"first": "nf3", "experts": "nf3"}, "quantized": quantized}
    known = eqquant.calibrate(fn, model, [x], **options).weights["experts"]
    w = [np.asarray(model["first"]), np.asarray(quantized["first"].dequantize())]
    rows = [np.tanh(np.asarray(x, np.float64) @ one.T) for one in w]
    for i in range(3):
        assert_pair(jax.tree.map(lambda part, i=i: part[i], known), *rows)


def test_padding_of_the_quantized_model_is_left_out(normal):
    model, x, mask = mlp(), normal(16, 32), np.arange(16) < 11
    quantized = eqquant.quantize_tree(model, "nf3")
    mean = lambda model, x: jnp.mean(forward(model, x), 0, where=mask[:, None])
    stats = eqquant.calibrate(mean, model, [x], quantized=quantized)
    pairs = zip(inputs_of(model, x), inputs_of(quantized, x), strict=True)
    for known, pair in zip(stats.weights.values(), pairs, strict=True):
        assert_pair(known, *(rows[mask] for rows in pair))


def test_large_inputs_change_the_unit(normal):
    model, x = mlp(), normal(16, 32)
    model = eqx.tree_at(
        lambda m: m.layers[0].weight, model, replace_fn=lambda w: w * 1e12
    )
    quantized = eqquant.quantize_tree(model, "nf3")
    stats = eqquant.calibrate(forward, model, [x], quantized=quantized)
    pairs = zip(inputs_of(model, x), inputs_of(quantized, x), strict=True)
    for known, pair in zip(stats.weights.values(), pairs, strict=True):
        assert_pair(known, *pair)
    assert stats.weights["layers.1.weight"].unit < 1


def test_equal_models_have_no_shift(normal):
    model, x = mlp(), normal(64, 32)
    alone = eqquant.calibrate(forward, model, [x])
    for same in (
        model,
        jax.tree.map(lambda x: jnp.array(x) if eqx.is_array(x) else x, model),
    ):
        stats = eqquant.calibrate(forward, model, [x], quantized=same)
        for path, known in stats.weights.items():
            assert not np.any(known.shift)
            np.testing.assert_allclose(known.gram, alone.weights[path].gram, rtol=1e-5)
            np.testing.assert_allclose(
                known.power, alone.weights[path].power, rtol=1e-5
            )


@pytest.mark.slow
@pytest.mark.parametrize("rotate", [False, True])
def test_the_move_is_half_of_the_least_squares_solution(rotate, normal):
    model, x = mlp(64), normal(512, 64)
    quantized = eqquant.quantize_tree(model, "nf2")
    stats = eqquant.calibrate(forward, model, [x], quantized=quantized)
    fine = eqquant.formats.Int8(block_size=8)
    new = eqquant.quantize_tree(model, fine, calibration=stats, rotate=rotate)
    pairs = zip(inputs_of(model, x), inputs_of(quantized, x), strict=True)
    for i, (of_float, of_quantized) in enumerate(pairs):
        w = np.asarray(model.layers[i].weight, np.float64)
        gram = of_quantized.T @ of_quantized
        damped = gram + 0.01 * np.mean(np.diagonal(gram)) * np.eye(len(gram))
        shift = (of_float - of_quantized).T @ of_quantized
        move = SHARE * w @ np.linalg.solve(damped, shift.T).T
        moved = np.asarray(new.layers[i].weight.dequantize(), np.float64) - w
        # INT8 rounds the result.
        assert np.max(np.abs(moved - move)) < 0.02 * np.max(np.abs(w))
        if i:
            assert np.max(np.abs(move)) > 0.1 * np.max(np.abs(w))


def test_weights_that_are_quantized_already_are_named(normal):
    model, x = mlp(), normal(64, 32)
    rules = {"layers.0.weight": "nf3", "*": None}
    quantized = eqquant.quantize_tree(model, rules=rules)
    with pytest.warns(UserWarning, match=r"contains 1 weight .*'layers.0.weight'"):
        eqquant.calibrate(forward, model, [x], quantized=quantized)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rules = {"layers.1.weight": "nf3", "*": None}
        eqquant.calibrate(forward, model, [x], quantized=quantized, rules=rules)


def in_order(model, format, x, corrects: bool):
    """Quantize the layers of an MLP one after the other."""
    quantized = model
    for i in range(len(model.layers)):
        rules = {f"layers.{i}.weight": format, "*": None}
        options = {"quantized": quantized} if corrects else {}
        stats = eqquant.calibrate(forward, model, [x], rules=rules, **options)
        quantized = eqquant.quantize_tree(
            quantized, rules=rules, calibration=stats, rotate=True
        )
    return quantized


AFFINE = eqquant.Int4(block_size=32, affine=True, fit="search")


@pytest.mark.parametrize("format", ["nf3", slow("nf4"), slow(AFFINE)])
def test_results_are_closer_to_the_float_model_on_other_data(format, normal):
    model = eqx.nn.MLP(64, 64, 128, 3, key=jax.random.key(0))
    mix = np.asarray(normal(64, 64)) / np.arange(1, 65)[:, None]
    x, other = normal(2048, 64) @ mix, normal(512, 64) @ mix
    expected = np.asarray(forward(model, other), np.float64)

    def error(corrects):
        quantized = in_order(model, format, x, corrects)
        return np.sum((np.asarray(forward(quantized, other)) - expected) ** 2)

    assert error(True) < 0.9 * error(False)


def test_tables_are_not_corrected(normal):
    class Words(eqx.Module):
        table: eqx.nn.Embedding
        layer: eqx.nn.Linear

    keys = jax.random.split(jax.random.key(0))
    model = Words(
        eqx.nn.Embedding(50, 16, key=keys[0]), eqx.nn.Linear(16, 16, key=keys[1])
    )
    tokens = np.arange(40)

    def run(model, tokens):
        return jax.vmap(lambda t: jnp.tanh(model.layer(model.table(t))))(tokens)

    quantized = eqquant.quantize_tree(model, "nf3")
    stats = eqquant.calibrate(run, model, [tokens], quantized=quantized)
    table, layer = stats.weights.values()
    assert table.shift is None and table.is_table and table.rows == 40
    alone = eqquant.calibrate(run, eqquant.dequantize_tree(quantized), [tokens])
    for path, known in stats.weights.items():
        np.testing.assert_allclose(
            known.gram, alone.weights[path].gram, rtol=1e-4, atol=1e-4
        )
    assert np.any(layer.shift)
    eqquant.quantize_tree(model, "nf3", calibration=stats)


def test_statistics_are_saved(normal):
    model, x = mlp(), normal(64, 32)
    quantized = eqquant.quantize_tree(model, "nf3")
    stats = eqquant.calibrate(forward, model, [x], quantized=quantized)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/stats.safetensors"
        eqquant.save(path, stats)
        again = eqquant.load(path, like=stats)
    assert eqx.tree_equal(stats, again)


def test_unsupported_arguments_are_errors(normal):
    model, x = mlp(), normal(64, 32)
    quantized = eqquant.quantize_tree(model, "nf3")
    calibrate = lambda q, **options: eqquant.calibrate(
        forward, model, [x], quantized=q, **options
    )
    with pytest.raises(ValueError, match="quantized must be None with curvature=True"):
        calibrate(quantized, curvature=True)
    for other in (mlp(16), mlp(32, 3), quantized.layers):
        with pytest.raises(ValueError, match="quantized must be the model after"):
            calibrate(other)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="explicit axes"):
        calibrate(quantized)


def test_a_shift_that_is_not_finite_is_an_error(normal):
    model, x = mlp(), normal(64, 32)
    stats = eqquant.calibrate(forward, model, [x], quantized=model)
    where = lambda s: s.weights["layers.1.weight"].shift
    stats = eqx.tree_at(where, stats, replace_fn=lambda shift: shift * jnp.nan)
    with pytest.raises(ValueError, match="shift of 'layers.1.weight' is not"):
        eqquant.quantize_tree(model, "nf3", calibration=stats)
