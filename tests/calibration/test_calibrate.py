"""`calibrate`: exact statistics of inputs, from unchanged model code."""

import dataclasses
import warnings

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow
from jax import lax


# XLA's float32 sums against float64 sums.
EXACT = 2e-6  # Sums of 1,200 products have 1.4e-6 with jax 0.12 on Zen 1.


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


@pytest.mark.parametrize("every", [1, 2, None])
def test_every_row_of_a_vmapped_scan_counts_and_gradients_are_optional(every, normal):
    stack, xs = linears(2), [normal(3, 4, 16) for _ in range(2)]

    def run(stack, x):
        arrays, static = eqx.partition(stack, eqx.is_array)

        def body(h, arrays):
            layer = eqx.combine(arrays, static)
            return jnp.tanh(jax.vmap(jax.vmap(layer))(h)), None

        return lax.scan(body, x, arrays)[0]

    options = {"every_row": True, "gradients_every": every}
    (known,) = eqquant.calibrate(run, stack, xs, **options).weights.values()
    assert_exact(known.gram[0], gram(np.concatenate(xs)))
    assert known.rows.tolist() == [24, 24]
    assert np.isfinite(known.power).tolist() == [every is not None] * 2
    if every is None:
        stats = eqquant.calibrate(run, stack, xs, **options)
        with pytest.raises(ValueError, match="must contain gradients"):
            eqquant.allocate(stack, 4000, ["nf4"], stats)


def test_gram_matrices_in_blocks_are_symmetric(normal):
    model, x = eqx.nn.Linear(1100, 2, key=jax.random.key(0)), normal(1200, 1100)
    for every_row in (False, True):
        stats = eqquant.calibrate(rows_of, model, [x], every_row=every_row)
        assert_exact(stats.weights["weight"].gram, gram(x))


def test_gradients_are_needed_to_find_padding(normal):
    model = eqx.nn.Linear(16, 16, key=jax.random.key(0))
    for options in ({"gradients_every": 2}, {"gradients_every": 0, "every_row": True}):
        with pytest.raises(ValueError, match="gradients_every must be"):
            eqquant.calibrate(rows_of, model, [normal(8, 16)], **options)


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


def test_curvature_is_the_gram_matrix_of_gradients_of_each_batch(normal):
    # With one output, random signs do not change the outer products of its gradient.
    stack = linears(2)
    batches = [normal(4, 16), 3 * normal(4, 16)]

    def run(stack, x):
        step = lambda x, layer: (jnp.tanh(jax.vmap(layer)(x)), None)
        return jnp.sum(lax.scan(step, x, stack)[0])

    stats = eqquant.calibrate(run, stack, batches, curvature=True).weights["weight"]
    assert stats.gram.shape == (2, 16, 16) and stats.is_table
    grads = [eqx.filter_grad(run)(stack, x).weight for x in batches]
    grads = np.asarray(grads, np.float64)
    expected = np.sum(np.swapaxes(grads, -1, -2) @ grads, 0)
    damping = 0.1 * np.trace(expected, axis1=1, axis2=2)[:, None, None] / 16
    assert_exact(stats.gram, expected + damping * np.eye(16))


@pytest.mark.slow
def test_curvature_reduces_the_change_of_results(normal):
    model = eqx.nn.Linear(32, 32, use_bias=False, key=jax.random.key(0))
    # The largest inputs have the least influence on the results.
    gates = jnp.where(jnp.arange(512) % 2, 1.0, 0.01)[:, None]
    x = normal(512, 32) @ normal(32, 32)
    x = jnp.where(gates < 1, 30 * normal(512, 32), x)
    batches = list(zip(x, gates, strict=True))

    def gated(model, batch):
        x, gate = batch
        return model(x) * gate

    losses = []
    for curvature in (False, True):
        stats = eqquant.calibrate(gated, model, batches, curvature=curvature)
        q = eqquant.quantize_tree(model, "nf3", calibration=stats)
        error = np.asarray(q.weight.dequantize() - model.weight, np.float64)
        losses.append(np.sum((np.asarray(x) @ error.T * np.asarray(gates)) ** 2))
    assert losses[1] < 0.8 * losses[0]


def test_curvature_needs_gradients(normal):
    model, x = eqx.nn.Linear(16, 16, key=jax.random.key(0)), normal(8, 16)
    options = {"every_row": True, "gradients_every": None, "curvature": True}
    with pytest.raises(ValueError, match="curvature=True needs gradients"):
        eqquant.calibrate(rows_of, model, [x], **options)


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
    with pytest.raises(ValueError, match="quantized already"):
        eqquant.calibrate(rows_of, eqquant.quantize_tree(model), [x])


@pytest.mark.parametrize("token, mode", [(8, None), (-9, "clip")])
@pytest.mark.filterwarnings("ignore:.*never reached:UserWarning")
@pytest.mark.filterwarnings("ignore:.*fewer rows than inputs:UserWarning")
def test_a_token_out_of_bounds_is_reported(token, mode, normal):
    model = {"table": normal(8, 16), "layer": linears(2)}

    def run(model, tokens):
        x = model["table"].at[tokens].get(mode=mode)
        return lax.scan(lambda x, w: (x @ w, None), x, model["layer"].weight)[0]

    rules = {"table": None}  # Reported even if the table is not observed.
    good, bad = np.arange(8), np.array([0, token])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*in bounds")
        eqquant.calibrate(run, model, [good, good - 8], rules=rules)
    with pytest.warns(
        UserWarning, match=r"calibrate: batches must .* batch 1: .*8, 16"
    ):
        eqquant.calibrate(run, model, [good, bad], rules=rules)


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
    shape = r"'weight' it has the shape \(16, 16\)"
    with pytest.raises(ValueError, match=f"calibration must .* {shape}"):
        eqquant.quantize_tree(other, calibration=stats)
    with pytest.raises(ValueError, match=f"allocate: stats must .* {shape}"):
        eqquant.allocate(other, 1000, ["nf4", "int8"], stats)
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


@pytest.mark.parametrize("inputs", [1e-30, 1e-19, 1e18, 1e30])
@pytest.mark.parametrize("weights", [1, 1e-20])
def test_the_magnitude_of_the_data_does_not_matter(inputs, weights, normal):
    """Rounding, errors and losses scale with powers of two exactly."""
    inputs, weights = (2.0 ** round(np.log2(x)) for x in (inputs, weights))
    layer, x = (
        eqx.nn.Linear(64, 16, use_bias=False, key=jax.random.key(0)),
        normal(256, 64),
    )
    x = x @ normal(64, 64)

    def rounded(inputs, weights):
        model = eqx.tree_at(lambda m: m.weight, layer, layer.weight * weights)
        stats = eqquant.calibrate(rows_of, model, [x * inputs, x[:100] * inputs])
        q = eqquant.quantize_tree(model, "nf4", calibration=stats)
        (row,) = eqquant.report(q, model, calibration=stats).rows
        return q.weight, row

    (q, row), (expected, like) = rounded(inputs, weights), rounded(1, 1)
    assert (q.codes == expected.codes).mean() > 0.999
    assert row.output_error == pytest.approx(like.output_error, rel=1e-3)
    assert row.output_error < 0.9 * row.rounded_output_error
    assert row.loss / inputs**2 / weights**2 == pytest.approx(like.loss, rel=1e-3)


def test_batches_of_different_magnitudes(normal):
    layer, x = eqx.nn.Linear(16, 16, key=jax.random.key(0)), normal(8, 16)
    stats = eqquant.calibrate(rows_of, layer, [x * 1e-19, x * 1e15, x * 1e-19])
    known = stats.weights["weight"]
    np.testing.assert_allclose(
        np.asarray(known.gram, float) / known.unit**2, gram(x * 1e15), rtol=1e-3
    )
    assert known.rows == 24


def test_the_sum_of_peaks_may_overflow(normal):
    layer = eqx.nn.Linear(16, 16, use_bias=False, key=jax.random.key(0))
    layer = eqx.tree_at(lambda m: m.weight, layer, layer.weight * 1e-20)
    x = normal(64, 16)
    known = eqquant.calibrate(rows_of, layer, [x * 3e37]).weights["weight"]
    np.testing.assert_allclose(
        np.asarray(known.gram, float) / known.unit**2, gram(x * 3e37), rtol=1e-3
    )
    for bad in (np.inf, np.nan):
        with pytest.raises(ValueError, match=r"must be finite, but batch 0.*weight"):
            eqquant.calibrate(rows_of, layer, [x.at[3, 4].set(bad)])


def test_gram_matrices_are_symmetric(normal):
    layer = eqx.nn.Linear(16, 16, key=jax.random.key(0))
    stats = eqquant.calibrate(rows_of, layer, [normal(64, 16)])
    stats.weights["weight"] = dataclasses.replace(
        stats.weights["weight"], gram=jnp.triu(stats.weights["weight"].gram)
    )
    with pytest.raises(ValueError, match="symmetric.*weight.*transpose"):
        eqquant.quantize_tree(layer, "nf4", calibration=stats)


def tied(table, ids):
    rows = jnp.tanh(jax.vmap(table)(ids))
    return (rows + jnp.roll(rows, 1, 0)) @ table.weight.T


def test_a_tied_embedding_observes_both_uses(normal):
    table = eqx.nn.Embedding(weight=normal(128, 16) @ normal(16, 16) / 4)
    ids = np.arange(256) % 128
    stats = eqquant.calibrate(tied, table, [ids])
    known = stats.weights["weight"]
    assert known.is_table and known.rows == 256 + 256
    # Perturb the weight: the expected loss is the squared change of the results.
    error = 1e-3 * normal(128, 16)
    moved = eqx.tree_at(lambda t: t.weight, table, table.weight + error)
    actual = jnp.sum(jnp.square(tied(moved, ids) - tied(table, ids)))
    assert known.loss(known.output_errors(error), error) == pytest.approx(
        float(actual), rel=0.3
    )
    losses = {}
    for method in ("gptq", "nearest"):
        q = eqquant.quantize_tree(table, "nf3", calibration=stats, method=method)
        losses[method] = jnp.sum(jnp.square(tied(q, ids) - tied(table, ids)))
    assert losses["gptq"] < 0.95 * losses["nearest"]


def test_an_array_that_is_multiplied_and_looked_up(normal):
    layer, x = (
        eqx.nn.Linear(16, 64, use_bias=False, key=jax.random.key(0)),
        normal(99, 16),
    )
    product = eqquant.calibrate(rows_of, layer, [x]).weights["weight"]
    lookup = lambda layer, x: layer.weight[jnp.array([3, 5, 3])]
    looked_up = eqquant.calibrate(lookup, layer, [x]).weights["weight"]
    both = lambda layer, x: (rows_of(layer, x), lookup(layer, x))
    known = eqquant.calibrate(both, layer, [x]).weights["weight"]
    assert not product.is_table and looked_up.is_table and known.is_table
    assert (looked_up.rows, known.rows) == (3, 99 + 3)
    # Each of 64 outputs has the gradient 1 or -1.
    expected = looked_up.gram + 64 * product.gram
    np.testing.assert_allclose(
        jnp.diagonal(known.gram), jnp.diagonal(expected), rtol=1e-5
    )


def test_warnings_about_little_data(normal):
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))(
        jax.random.split(jax.random.key(0), 4)
    )

    def experts(stack, x):
        return x @ stack.weight[1].T, x @ stack.weight[3].T

    with pytest.warns(UserWarning) as caught:
        eqquant.calibrate(experts, stack, [normal(8, 16)])
    messages = [str(warning.message) for warning in caught]
    assert any("never reached 2 of 4 matrices of weight." in m for m in messages)
    assert any("weight (8 rows of 16 inputs)" in m for m in messages)


def test_inputs_of_zeros_are_reported(normal):
    """Such as the empty slots of an expert that saw no tokens."""
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))(
        jax.random.split(jax.random.key(0), 3)
    )
    run = lambda stack, x: [v @ w.T for v, w in zip(x, stack.weight, strict=True)]
    x = normal(3, 32, 16)
    with pytest.warns(UserWarning, match=r"never reached 1 of 3 matrices of weight\."):
        eqquant.calibrate(run, stack, [x.at[1].set(0)])
    with pytest.warns(UserWarning, match=r"zeros\) never reached \['weight'\]"):
        stats = eqquant.calibrate(run, stack, [0 * x])
    with pytest.warns(UserWarning, match="rounded plainly"):
        q = eqquant.quantize_tree(stack, "nf4", calibration=stats)
    plain = eqquant.quantize_tree(stack, "nf4")
    assert (q.weight.codes == plain.weight.codes).all()


@pytest.mark.parametrize(
    "mode",
    [
        lambda: jax.debug_nans(True),
        lambda: jax.numpy_rank_promotion("raise"),
        lambda: jax.numpy_dtype_promotion("strict"),
    ],
)
def test_strict_modes_of_jax(mode, normal):
    layer, x = eqx.nn.Linear(16, 16, key=jax.random.key(0)), normal(32, 16)
    with mode():
        stats = eqquant.calibrate(rows_of, layer, [x])
    assert_exact(stats.weights["weight"].gram, gram(x))


def test_imaginary_results_reach_the_data(normal):
    layer, x = eqx.nn.Linear(16, 16, key=jax.random.key(0)), normal(32, 16)
    known = eqquant.calibrate(lambda m, x: 1j * rows_of(m, x), layer, [x])
    assert_exact(known.weights["weight"].gram, gram(x))
