"""Quantization-aware training."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eqquant import Ternary
from helpers import assert_identical, relative, slow
from models import KEY, Mixed, mlp, scalar, TOKENS


RULES = {"conv.*": "nf4", "stacked.*": "ternary", "cell.weight_hh": None}


def arrays(tree):
    return eqx.filter(tree, eqx.is_array)


#
# The same choice and values as after conversion
#


@pytest.mark.slow
def test_the_weights_are_those_of_the_later_model():
    model, format, rules = Mixed(), "int8", RULES
    later = eqquant.dequantize_tree(eqquant.quantize_tree(model, format, rules=rules))
    fake = eqquant.training.fake_quantize_tree(model, format, rules=rules)
    assert type(fake) is Mixed
    assert_identical(fake, later)
    compiled = eqx.filter_jit(eqquant.training.fake_quantize_tree)(
        model, format, rules=rules
    )
    assert_identical(compiled, later)
    # All other arrays are the same objects.
    assert fake.norm.weight is model.norm.weight


def test_where_and_min_size():
    model = mlp()
    only = lambda x: eqx.is_array(x) and x.shape == (64, 64)
    for options in ({"where": only}, {"min_size": 10, "rules": {"*.1.*": "nf4"}}):
        later = eqquant.quantize_tree(model, "int8", **options)
        fake = eqquant.training.fake_quantize_tree(model, "int8", **options)
        assert_identical(fake, eqquant.dequantize_tree(later))
        wrapped = eqquant.FakeQuantized(model, "int8", **options)
        assert_identical(arrays(wrapped.quantized()), arrays(later))


@pytest.mark.parametrize("format", ["nf4", "ternary"])
def test_forward_results(format):
    """Results equal the dequantized model bit for bit, and the quantized model up to
    the rounding of its products."""
    model, x = mlp(), jax.random.normal(KEY, (8, 64))
    wrapped = eqquant.FakeQuantized(model, format)
    forward = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
    trained = forward(wrapped, x)
    quantized = wrapped.quantized()
    assert_identical(trained, forward(eqquant.dequantize_tree(quantized), x))
    assert relative(forward(quantized, x), trained) < 1e-4
    with jax.default_matmul_precision("highest"):
        assert relative(forward(quantized, x), trained) < 1e-6


def test_gradients_reach_the_master_weights():
    model = Mixed()
    wrapped = eqquant.FakeQuantized(model, "int8", rules=RULES)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model):
        return jnp.sum(model(TOKENS) ** 2)

    ours = gradient(wrapped).model
    # Straight-through: the gradient at the rounded weights.
    expected = gradient(eqquant.dequantize_tree(wrapped.quantized()))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert relative(a, b) < 1e-5
        assert jnp.any(a != 0)


def test_arrays_of_the_wrapper_are_those_of_the_model():
    model = mlp()
    wrapped = eqquant.FakeQuantized(model)
    assert [id(x) for x in jax.tree.leaves(arrays(wrapped))] == [
        id(x) for x in jax.tree.leaves(arrays(model))
    ]


def test_stacks_of_wrapped_models():
    make = lambda key: eqquant.FakeQuantized(eqx.nn.Linear(64, 64, key=key), "ternary")
    stacked = eqx.filter_vmap(make)(jax.random.split(KEY, 3))
    quantized = eqx.filter_vmap(lambda m: m.quantized())(stacked)
    assert quantized.weight.shape == (3, 64, 64)
    assert_identical(arrays(quantized), arrays(stacked.quantized()))
    run = eqx.filter_jit(eqx.filter_vmap(lambda m: m(jnp.ones(64))))
    assert relative(run(stacked), run(quantized)) < 1e-4


@pytest.mark.parametrize("format", ["nf4", slow("binary")])
def test_training_with_optax(format):
    """Training improves on rounding to nearest."""
    x = jax.random.normal(KEY, (64, 64))
    y = jnp.sin(x)
    optimiser = optax.adam(3e-3)

    @eqx.filter_value_and_grad
    def loss(model):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    @eqx.filter_jit
    def train(model):
        carry, static = eqx.partition(
            (model, optimiser.init(eqx.filter(model, eqx.is_inexact_array))),
            eqx.is_array,
        )

        def step(carry, _):
            model, state = eqx.combine(carry, static)
            value, gradients = loss(model)
            updates, state = optimiser.update(gradients, state)
            new = eqx.apply_updates(model, updates), state
            return eqx.filter(new, eqx.is_array), value

        carry, losses = jax.lax.scan(step, carry, length=100)
        return eqx.combine(carry, static)[0], losses

    wrapped, losses = train(eqquant.FakeQuantized(mlp(), format))
    assert losses[-1] < losses[0] / 2
    trained = loss(wrapped)[0]
    np.testing.assert_allclose(loss(wrapped.quantized())[0], trained, rtol=1e-2)


#
# Learned scales
#


def test_scales_are_learned_and_kept():
    rules = {"layers.0.*": Ternary(block_size=32), "layers.1.*": "binary"}
    wrapped = eqquant.FakeQuantized(mlp(), "int8", rules=rules, learn_scales=True)
    assert [s.shape for s in wrapped.scales] == [(64, 2), (64, 1), (64, 1)]
    x = jax.random.normal(KEY, (8, 64))

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    start = wrapped.scales
    for _ in range(3):
        step = jax.tree.map(lambda g: -0.1 * g, gradient(wrapped))
        wrapped = eqx.apply_updates(wrapped, step)
    quantized = wrapped.quantized()
    for layer, old, new in zip(quantized.layers, start, wrapped.scales, strict=True):
        assert jnp.any(old != new)
        assert_identical(layer.weight.scales, new)
    forward = eqx.filter_jit(lambda model: jax.vmap(model)(x))
    assert_identical(forward(wrapped), forward(eqquant.dequantize_tree(quantized)))


#
# Errors, which name the way out
#


def test_what_is_not_what_was_trained():
    wrapped = eqquant.FakeQuantized(mlp(), "nf4")
    other = eqquant.quantize_tree(wrapped, "int8")
    with pytest.raises(ValueError, match=r"layers\.0\.weight.*trained for NF4.*Int8.*"):
        other(jnp.ones(64))
    same = eqquant.quantize_tree(wrapped, "nf4")
    assert_identical(arrays(same.model), arrays(wrapped.quantized()))
    same(jnp.ones(64))
    with pytest.raises(ValueError, match="quantized already"):
        same.quantized()
    learned = eqquant.FakeQuantized(mlp(), "int8", learn_scales=True)
    with pytest.raises(ValueError, match=r"learned scales.*\.quantized\(\)"):
        eqquant.quantize_tree(learned, "int8")(jnp.ones(64))


def test_codes_that_an_optimiser_has_changed(default_format):
    """An optimiser that receives all arrays changes codes, which raises an error."""
    model = eqquant.quantize_tree(eqx.nn.Linear(64, 64, key=KEY), default_format)
    changed = eqx.apply_updates(model, jax.tree.map(lambda x: 0.1 * x, model))
    for use in (
        lambda m: m(jnp.ones(64)),
        lambda m: jnp.ones(64) @ m.weight,
        lambda m: m.weight[0],
        lambda m: m.weight.dequantize(),
        eqx.filter_jit(eqquant.quaxify(lambda m: m.weight @ jnp.ones(64))),
    ):
        with pytest.raises(TypeError, match=r"codes of .* got float32: .*lora_tree"):
            use(changed)


def test_the_gradient_of_a_quantized_model_is_no_model():
    model = eqquant.quantize_tree(mlp(), "nf4")
    gradients = eqx.filter_grad(scalar)(model, jnp.ones(64))
    trainable, _ = eqx.partition(model, eqquant.trainable_mask(model))
    for part in (gradients, trainable):
        with pytest.raises(TypeError, match=r"lacks some of its parts.*eqx\.combine"):
            part(jnp.ones(64))


def test_nothing_to_train_quantized():
    quantized = eqquant.quantize_tree(mlp(), "nf4")
    for model, options in (
        (quantized, {}),
        (mlp(), {"min_size": 10**6}),
        (mlp(), {"rules": {"*": None}}),
    ):
        for make in (eqquant.training.fake_quantize_tree, eqquant.FakeQuantized):
            with pytest.raises(ValueError, match=r"no weight is chosen.*report"):
                make(model, "int8", **options)


def test_bad_arguments():
    model = mlp()
    for make in (eqquant.training.fake_quantize_tree, eqquant.FakeQuantized):
        name = make.__name__
        with pytest.raises(ValueError, match="format is 'fp3', but must be .*'nf3'"):
            make(model, "fp3")
        with pytest.warns(
            UserWarning, match=rf"{name}: these rules match nothing: \['x"
        ):
            make(model, rules={"x.*": "int8"})
        with pytest.raises(TypeError, match="rules"):
            make(model, rules={3: "int8"})
        with pytest.raises(TypeError, match=f"{name}: where must be"):
            make(model, where=1.5)
        with pytest.raises(ValueError, match=r"layers\.0\.weight: axis must be"):
            wrapped = make(model, rules={"layers.0.weight": ("int8", 7)})
            wrapped(jnp.ones(64))
    with pytest.raises(ValueError, match=r"at layers\.0\.weight:.*Ternary and Binary"):
        eqquant.FakeQuantized(model, "nf4", learn_scales=True)
    weight = lambda m: m.layers[1].weight
    broken = eqx.tree_at(weight, model, jnp.full((64, 64), jnp.nan))
    with pytest.raises(ValueError, match=r"at layers\.1\.weight:.*4096 values are NaN"):
        eqquant.training.fake_quantize_tree(broken)
    whole = eqx.tree_at(weight, model, jnp.ones((64, 64), int))
    with pytest.raises(TypeError, match=r"at layers\.1\.weight:.*got int32: only the"):
        eqquant.training.fake_quantize_tree(whole, rules={"layers.1.weight": "int8"})
    wrapped = eqquant.FakeQuantized(model)
    fewer = eqx.tree_at(lambda w: w.model.layers, wrapped, model.layers[1:])
    with pytest.raises(ValueError, match="another structure.*Wrap it anew"):
        fewer(jnp.ones(64))


@pytest.mark.parametrize("learn_scales", [False, True])
def test_rotated(learn_scales):
    """Weights are trained in the original basis, and rounded in the rotated basis."""
    layer = eqx.nn.Linear(64, 8, key=KEY)
    how = {"min_size": 1, "rotate": True}
    wrapped = eqquant.FakeQuantized(layer, "ternary", learn_scales=learn_scales, **how)
    quantized = wrapped.quantized()
    assert isinstance(quantized.weight, eqquant.arrays.RotatedArray)
    if not learn_scales:
        later = eqquant.quantize_tree(layer, "ternary", **how)
        assert_identical(arrays(quantized), arrays(later))
    x = jax.random.normal(KEY, (64,))
    rounded = eqquant.dequantize_tree(quantized)
    assert_identical(wrapped.fake_quantized().weight, rounded.weight)
    loss = lambda model: jnp.sum(model(x) ** 2)
    gradient = eqx.filter_grad(loss)(wrapped)
    if learn_scales:
        assert (gradient.scales[0] != 0).all()
    else:
        of_rounded = eqx.filter_grad(loss)(rounded)
        assert_identical(gradient.model.weight, of_rounded.weight)
    assert wrapped.quantized().weight.format == eqquant.Ternary()
    with pytest.raises(ValueError, match="quantized already"):
        eqx.tree_at(lambda w: w.model, wrapped, quantized).quantized()


def test_what_cannot_be_rotated():
    for format, how in (
        ("ternary", {"quantized_products": True}),
        ("int8", {"activations": "int8"}),
    ):
        with pytest.raises(ValueError, match="FakeQuantized: rotate must be False"):
            eqquant.FakeQuantized(mlp(), format, rotate=True, **how)
