"""Adapters: training, dropout, merging."""

import io
import re

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from adapters import adapted, is_lora, KEY, MLP, perturb, stacked
from helpers import assert_identical, relative, slow
from jax import lax


REST = ["int8", "ternary", "binary", eqquant.NF4(double_quantization=True)]


@pytest.fixture(params=[None, "nf4"], ids=str)
def format(request):
    """A format; None for adapters beside floats. Adapters are independent of
    formats."""
    return request.param


@pytest.mark.parametrize("format", [None, "nf4", *map(slow, REST)], ids=str)
def test_it_changes_nothing_at_first_bit_by_bit(format, normal):
    model = adapted(MLP, format)
    before = MLP if format is None else eqquant.quantize_tree(MLP, format)
    x = normal(5, 67)
    assert type(model) is eqx.nn.MLP
    assert_identical(jax.vmap(model)(x), jax.vmap(before)(x))
    assert_identical(model(x[0]), before(x[0]))
    run = eqx.filter_jit(lambda model, x: jax.vmap(jax.vmap(model))(x))
    assert_identical(run(model, x[None]), run(before, x[None]))


def test_its_start_depends_on_the_path_alone():
    one = adapted(MLP, None)
    other = adapted(MLP, "int8", rules={"layers.0.*": None, "layers.1.*": 2})
    assert not is_lora(other.layers[0].weight)
    assert other.layers[1].weight.rank == 2
    assert_identical(one.layers[2].weight.a, other.layers[2].weight.a)
    w = adapted(eqx.nn.Linear(4096, 64, key=KEY), None, rank=16).weight
    # A standard deviation of 1/64, estimated from 65536 numbers.
    assert abs(64 * float(jnp.std(w.a)) - 1) < 0.02
    assert (w.b == 0).all()


def test_in_either_order():
    later = eqquant.quantize_tree(adapted(MLP, None), "nf4")
    assert_identical(later, adapted(MLP, "nf4"))


#
# Training
#


def train_step(optimiser):
    """Run a training step as in any Equinox program."""

    @eqx.filter_jit
    def step(trainable, frozen, state, x):
        def loss(trainable):
            model = eqx.combine(trainable, frozen)
            return jnp.mean((jax.vmap(model)(x) - 1) ** 2)

        value, gradients = eqx.filter_value_and_grad(loss)(trainable)
        updates, state = optimiser.update(gradients, state, trainable)
        return value, eqx.apply_updates(trainable, updates), state

    return step


def test_only_adapters_are_trainable(format):
    model = adapted(MLP, format)
    trainable, _ = eqx.partition(model, eqquant.trainable_mask(model))
    leaves = {
        jax.tree_util.keystr(p)
        for p, _ in jax.tree_util.tree_leaves_with_path(trainable)
    }
    assert leaves == {f".layers[{i}].weight.{name}" for i in range(3) for name in "ab"}
    repr(trainable)  # A partial quantized array has no shape.
    # Without adapters, all floating-point arrays are trainable.
    assert eqquant.trainable_mask(MLP).layers[0].bias


def test_one_step_changes_adapters_and_nothing_else(format, normal):
    model = adapted(MLP, format)
    before = jax.tree.map(jnp.copy, eqx.filter(model, eqx.is_array))
    trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))
    optimiser = optax.adamw(1e-2, weight_decay=0.1)
    state = optimiser.init(trainable)
    adapters = sum(4 * (4 * i + 4 * o) for i, o in ((67, 53), (53, 53), (53, 41)))
    assert eqquant.trees.nbytes(trainable) == adapters
    # Two moments for each element of an adapter, and a counter.
    assert eqquant.trees.nbytes(state) == 2 * adapters + 4
    _, trainable, state = train_step(optimiser)(trainable, frozen, state, normal(8, 67))
    after = eqx.combine(trainable, frozen)
    frozen_of = lambda tree: eqx.filter(
        eqx.filter(tree, eqx.is_array), eqquant.trainable_mask(model), inverse=True
    )
    assert_identical(frozen_of(after), frozen_of(before))
    for i in range(3):
        assert (after.layers[i].weight.b != 0).any()
    # `b` is zero before the first step, and so is the gradient of `a`.
    _, trainable, _ = train_step(optimiser)(trainable, frozen, state, normal(8, 67))
    assert (trainable.layers[0].weight.a != after.layers[0].weight.a).any()


def test_gradients_are_those_of_the_dense_sum(format, normal):
    model = perturb(adapted(MLP, format))
    trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))
    x = normal(5, 67)

    def loss(trainable, dense):
        model = eqx.combine(trainable, frozen)
        if dense:
            model = eqquant.merge_lora(model)
        return jnp.sum(jnp.sin(jax.vmap(model)(x)))

    got, expected = (jax.grad(loss)(trainable, dense) for dense in (False, True))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert relative(a, b) < 1e-3  # Three layers, each 1e-4.
    tangents = jax.tree.map(jnp.ones_like, trainable)
    forwards, backwards = (
        jax.jvp(lambda t: loss(t, False), (trainable,), (tangents,))[1],
        sum(jnp.sum(leaf) for leaf in jax.tree.leaves(got)),
    )
    assert relative(forwards, backwards) < 1e-3
    # Per-example gradients, for which mapped rows are not merged.
    each = jax.vmap(
        lambda x: jax.grad(lambda t: jnp.sum(eqx.combine(t, frozen)(x)))(trainable)
    )(x)
    total = jax.grad(lambda t: jnp.sum(jax.vmap(eqx.combine(t, frozen))(x)))(trainable)
    for a, b in zip(jax.tree.leaves(each), jax.tree.leaves(total), strict=True):
        assert relative(a.sum(0), b) < 1e-3


@pytest.mark.parametrize("format", ["nf4", *map(slow, REST)], ids=str)
def test_no_weight_in_floating_point_anywhere_in_a_step(format, normal):
    model = adapted(MLP, format)
    trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))
    optimiser = optax.adam(1e-2)
    state = optimiser.init(trainable)
    step = train_step(optimiser)
    x = normal(5, 67)
    watch = lambda model, x: step(trainable, frozen, state, x)
    eqquant.debug.assert_not_materialised(watch, model, x)
    # Control: the check detects a decoded weight.
    with pytest.raises(eqquant.MaterialiseError):
        eqquant.debug.assert_not_materialised(
            lambda model, x: jax.vmap(eqquant.merge_lora(model))(x), model, x
        )


@pytest.mark.slow
@pytest.mark.parametrize("format", REST[-1:], ids=str)
def test_nor_with_remat_and_scan(format, normal):
    layers = stacked(format)
    trainable, frozen = eqx.partition(layers, eqquant.trainable_mask(layers))
    x = normal(5, 53)

    def gradient(layers, x):
        def loss(trainable):
            dynamic, static = eqx.partition(
                eqx.combine(trainable, frozen), eqx.is_array
            )

            @jax.checkpoint
            def step(x, layer):
                return jnp.tanh(jax.vmap(eqx.combine(layer, static))(x)), None

            return jnp.sum(lax.scan(step, x, dynamic)[0])

        return jax.grad(loss)(trainable)

    eqquant.debug.assert_not_materialised(gradient, layers, x)
    assert gradient(layers, x).weight.a.shape == (3, 4, 53)


def test_training_learns(normal):
    """An adapter of sufficient rank learns the map."""
    target = normal(16, 2) @ normal(2, 32) / 8
    linear = eqx.nn.Linear(32, 16, use_bias=False, key=KEY)
    model = adapted(linear, "int8", rank=2)
    trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))
    goal = model.weight.base.dequantize() + target
    x = normal(64, 32)
    y = x @ goal.T
    optimiser = optax.adam(3e-2)

    @jax.jit
    def run(trainable):
        loss = lambda t: jnp.mean((jax.vmap(eqx.combine(t, frozen))(x) - y) ** 2)

        def step(carry, _):
            trainable, state = carry
            value, gradients = jax.value_and_grad(loss)(trainable)
            updates, state = optimiser.update(gradients, state)
            return (eqx.apply_updates(trainable, updates), state), value

        return lax.scan(step, (trainable, optimiser.init(trainable)), None, 400)

    _, losses = run(trainable)
    assert losses[-1] < 1e-3 * losses[0]


#
# Dropout
#


def test_dropout(normal):
    model = perturb(adapted(MLP, "nf4", dropout=0.5))
    x = normal(5, 67)
    run = eqx.filter_jit(
        lambda model, key: jax.vmap(eqquant.training.with_dropout_key(model, key))(x)
    )
    clean = run(model, None)
    without = perturb(adapted(MLP, "nf4"))
    assert_identical(clean, jax.vmap(without)(x))
    one, again, other = (run(model, jax.random.key(i)) for i in (0, 0, 1))
    assert_identical(one, again)
    assert relative(one, clean) > 1e-2 and relative(one, other) > 1e-2
    # Dropout is on by default, but `b` is zero, so the result is unchanged.
    assert relative(jax.vmap(model)(x), clean) > 1e-2
    fresh = adapted(MLP, "nf4", dropout=0.5)
    assert_identical(jax.vmap(fresh)(x), jax.vmap(eqquant.quantize_tree(MLP, "nf4"))(x))


def test_gradients_with_dropout_and_remat_are_those_of_one_mask(normal):
    model = perturb(adapted(MLP, "nf4", dropout=0.5))
    x = normal(5, 67)
    plain = jax.grad(lambda x: jnp.sum(jnp.sin(jax.vmap(model)(x))))(x)
    again = jax.grad(
        lambda x: jnp.sum(jnp.sin(eqx.filter_checkpoint(jax.vmap(model))(x)))
    )(x)
    assert relative(again, plain) < 1e-5


#
# Merging, reports, pytrees
#


def test_merging_into_floats(format, normal):
    model = perturb(adapted(MLP, format))
    before = jax.tree.map(jnp.copy, eqx.filter(model, eqx.is_array))
    merged = eqquant.merge_lora(model)
    assert jax.tree.structure(merged) == jax.tree.structure(MLP)
    w = model.layers[1].weight
    base = np.asarray(eqquant.dequantize(w.base), np.float64)
    expected = base + np.asarray(w.b, np.float64) @ np.asarray(w.a, np.float64)
    # One rounding to float32, and a sum of four.
    assert relative(merged.layers[1].weight, expected) < 3e-7
    # The original model is unchanged.
    assert_identical(eqx.filter(model, eqx.is_array), before)


def test_merging_and_quantizing_again(normal):
    model = perturb(adapted(MLP, "nf4", rules={"layers.1.*": None}))
    merged, report = eqquant.merge_lora(model, "int8")
    assert [row.path for row in report.rows] == ["layers.0.weight", "layers.2.weight"]
    floats = eqquant.merge_lora(model)
    for i, row in zip((0, 2), report.rows, strict=True):
        w = merged.layers[i].weight
        assert eqquant.is_quantized(w) and row.format == eqquant.Int8()
        error = relative(w.dequantize(), floats.layers[i].weight)
        assert row.relative_error == pytest.approx(error, rel=1e-4)
    # Arrays without an adapter are unchanged.
    assert_identical(merged.layers[1].weight, model.layers[1].weight)
    # Without training, requantization to the same format is exact.
    _, nothing = eqquant.merge_lora(adapted(MLP, "nf4"), "nf4")
    assert all(row.relative_error < 1e-6 for row in nothing.rows)


def test_merging_twice_is_an_error():
    merged = eqquant.merge_lora(adapted(MLP, "nf4"))
    with pytest.raises(ValueError, match="no adapters: they are merged already"):
        eqquant.merge_lora(merged)


def test_the_other_functions_of_trees(normal):
    model = perturb(adapted(MLP, "nf4"))
    w = model.layers[0].weight
    assert eqquant.is_quantized(w.base) and not eqquant.is_quantized(w)
    report = eqquant.report(model, MLP)
    row = report.rows[0]
    assert (row.path, row.format) == ("layers.0.weight", eqquant.NF4())
    assert row.bytes_after == w.nbytes == eqquant.trees.nbytes(w)
    assert row.relative_error == pytest.approx(
        relative(w.dequantize(), MLP.layers[0].weight), rel=1e-4
    )
    floats = eqquant.dequantize_tree(model)
    assert is_lora(floats.layers[0].weight)
    assert_identical(eqquant.merge_lora(floats), eqquant.merge_lora(model))
    assert "lora[rank=4](nf4:f32[53,67])" in repr(model)
    assert eqquant.trees.nbytes(adapted(MLP, None, dropout=0.1)) > 0


def test_serialisation(format):
    model = perturb(adapted(MLP, format))
    buffer = io.BytesIO()
    eqx.tree_serialise_leaves(buffer, model)
    buffer.seek(0)
    skeleton = eqx.filter_eval_shape(lambda: adapted(MLP, format))
    loaded = eqx.tree_deserialise_leaves(buffer, skeleton)
    assert_identical(eqx.filter(loaded, eqx.is_array), eqx.filter(model, eqx.is_array))


#
# Errors
#


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(rank=0), ValueError, "rank must be at least 1, got 0"),
        (
            dict(rules={"layers.0.weight": 54}),
            ValueError,
            r"at layers.0.weight: rank 54 is larger .*\(53, 67\)",
        ),
        (dict(rank=54), ValueError, "Weights are smaller than the rank, 54: "),
        (dict(rank=True), TypeError, "rank must be an integer, got True"),
        (dict(alpha=0), ValueError, "alpha must be positive, got 0"),
        (
            dict(dropout=1.0),
            ValueError,
            "dropout must be at least 0 and below 1, got 1",
        ),
        (dict(where=lambda _: False), ValueError, "no weight is chosen"),
        (
            dict(rules={"layers.0.bias": 1}),
            ValueError,
            "at layers.0.bias: .*output axes",
        ),
        (dict(rules={"layers.0.weight": (2, 7)}), ValueError, "axis .* got 7"),
        (dict(rules={"layers.0.weight": 1.5}), TypeError, r"rank must be .* got 1\.5"),
        (dict(rules={"layers.0.weight": (2, (0, 1))}), ValueError, "are all inputs"),
    ],
)
def test_bad_arguments(arguments, error, message):
    options = {"rank": 4, "key": KEY, **arguments}
    with pytest.raises(error, match=message):
        eqquant.lora_tree(MLP, options.pop("rank"), **options)


def test_what_an_optimiser_must_not_see():
    model = eqquant.quantize_tree(MLP, eqquant.NF4(double_quantization=True))
    trainable, _ = eqx.partition(model, eqquant.trainable_mask(model))
    eqquant.debug.assert_trainable(trainable)
    with pytest.raises(TypeError, match=r"layers\[0\]\.weight\.codes.*trainable_mask"):
        eqquant.debug.assert_trainable(model)
    floats = eqx.filter(eqquant.quantize_tree(MLP, "int8"), eqx.is_inexact_array)
    with pytest.raises(TypeError, match=r"layers\[0\]\.weight\.scales"):
        eqquant.debug.assert_trainable(floats)


def test_bad_models():
    with pytest.raises(ValueError, match="it has an adapter already.*merge_lora"):
        adapted(adapted(MLP, None), None)
    with pytest.raises(TypeError, match="at w: an adapter needs a floating.*int32"):
        adapted({"w": jnp.ones((8, 8), int)}, None, rules={"w": 2})
    with pytest.raises(ValueError, match="no adapter in model has dropout"):
        eqquant.training.with_dropout_key(adapted(MLP, None), KEY)
    assert eqquant.training.with_dropout_key(MLP, None) is not None
    with pytest.warns(UserWarning, match=re.escape("match nothing: ['nowhere']")):
        adapted(MLP, None, rules={"nowhere": 2})
