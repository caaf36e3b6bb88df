"""Models that train as if they were quantized."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eqquant import Int8, NF4, Ternary
from helpers import assert_identical, relative


KEY = jax.random.key(0)
W8A8 = Int8(activations="int8")


def mlp() -> eqx.nn.MLP:
    return eqx.nn.MLP(64, 64, 64, 2, key=KEY)


def arrays(tree):
    return eqx.filter(tree, eqx.is_array)


class Mixed(eqx.Module):
    """A layer of each kind."""

    embedding: eqx.nn.Embedding
    conv: eqx.nn.Conv1d
    stacked: eqx.nn.Linear
    cell: eqx.nn.GRUCell
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm

    def __init__(self):
        self.embedding = eqx.nn.Embedding(32, 32, key=KEY)
        self.conv = eqx.nn.Conv1d(32, 32, 3, padding=1, key=KEY)
        make = lambda key: eqx.nn.Linear(32, 32, key=key)
        self.stacked = eqx.filter_vmap(make)(jax.random.split(KEY, 3))
        self.cell = eqx.nn.GRUCell(32, 32, key=KEY)
        self.attention = eqx.nn.MultiheadAttention(2, 32, key=KEY)
        self.norm = eqx.nn.LayerNorm(32)

    def __call__(self, tokens):
        x = self.conv(jax.vmap(self.embedding)(tokens).T).T

        @eqx.filter_checkpoint
        def layer(x, linear):
            return x + jax.vmap(linear)(jax.nn.relu(x)), None

        x, _ = jax.lax.scan(layer, x, self.stacked)
        x = x + self.attention(x, x, x)
        step = lambda state, x: (self.cell(x, state), None)
        state, _ = jax.lax.scan(step, jnp.zeros(32), x)
        return self.norm(state)


TOKENS = jnp.arange(7) * 3
RULES = {"conv.*": "nf4", "stacked.*": "ternary", "cell.weight_hh": None}


#
# The same choice, and the same values, as later
#


def test_the_weights_are_those_of_the_later_model():
    model, format, rules = Mixed(), "int8", RULES
    later = eqquant.dequantize_tree(eqquant.quantize_tree(model, format, rules=rules))
    fake = eqquant.fake_quantize_tree(model, format, rules=rules)
    assert type(fake) is Mixed
    assert_identical(fake, later)
    compiled = eqx.filter_jit(eqquant.fake_quantize_tree)(model, format, rules=rules)
    assert_identical(compiled, later)
    # What is not chosen is the same object.
    assert fake.norm.weight is model.norm.weight


def test_where_and_min_size():
    model = mlp()
    only = lambda x: eqx.is_array(x) and x.shape == (64, 64)
    for options in ({"where": only}, {"min_size": 10, "rules": {"*.1.*": "nf4"}}):
        later = eqquant.quantize_tree(model, "int8", **options)
        fake = eqquant.fake_quantize_tree(model, "int8", **options)
        assert_identical(fake, eqquant.dequantize_tree(later))
        wrapped = eqquant.FakeQuantized(model, "int8", **options)
        assert_identical(arrays(wrapped.quantized()), arrays(later))


@pytest.mark.parametrize("format", ["nf4", "ternary"])
def test_forward_results(format):
    """Bit for bit those of the dequantized model; those of the quantized one up to the
    rounding of its products: see docs/precision.md."""
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
    # Straight through: the gradient at the rounded weights.
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


@pytest.mark.parametrize("format", ["nf4", "binary"])
def test_training_with_optax(format):
    """A quantized model fits what its float model does not when merely rounded."""
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
# Products of the later model
#


def both(model, format, **options):
    """As it is trained, with products of quantized arrays, and converted."""
    wrapped = eqquant.FakeQuantized(model, format, quantized_products=True, **options)
    return wrapped, wrapped.quantized()


def scalar(model, *args):
    return jnp.sum(jnp.square(model(*args)))


# Every format, and several recipes of docs/precision.md.
PRODUCTS = [
    pytest.param(format, id=repr(format))
    for format in (
        NF4(),
        NF4(double_quantization=True),
        NF4(precision="default"),
        Int8(),
        Int8(precision="default", block_size=32),
        Int8(precision="highest"),
        W8A8,
        Ternary(),
        Ternary(precision="default", activations="int8"),
        eqquant.Binary(precision="default"),
    )
]


@pytest.mark.parametrize("format", PRODUCTS)
def test_products_are_those_of_the_quantized_model(normal, format):
    """Bit for bit: one at a time, and as a batch, eagerly and compiled."""
    wrapped, quantized = both(mlp(), format)
    batch = jax.vmap(lambda model, x: model(x), (None, 0))
    for fn in (lambda model, x: model(x[0]), batch, eqx.filter_jit(batch)):
        x = normal(40, 64)
        assert_identical(fn(wrapped, x), fn(quantized, x))


@pytest.mark.parametrize("format", [NF4(precision="default"), W8A8])
def test_products_in_every_layer(format):
    """Attention, a recurrent cell under a scan, a scan over stacked layers, remat."""
    wrapped, quantized = both(Mixed(), format, rules={"conv.*": None})
    forward = eqx.filter_jit(jax.vmap(lambda model, x: model(x), (None, 0)))
    tokens = jnp.stack([TOKENS, TOKENS + 1])
    assert_identical(forward(wrapped, tokens), forward(quantized, tokens))


def test_products_of_stacks(normal):
    make = lambda key: eqx.nn.Linear(64, 64, key=key)
    stacked = eqx.filter_vmap(make)(jax.random.split(KEY, 3))
    wrapped, quantized = both(stacked, "int8")
    run = eqx.filter_jit(lambda m, x: eqx.filter_vmap(lambda m: jax.vmap(m)(x))(m))
    x = normal(5, 64)
    assert_identical(run(wrapped.fake_quantized(), x), run(quantized, x))


@pytest.mark.parametrize("options", [{}, {"clip": True}, {"learn_scales": True}])
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_gradients_of_quantized_products(normal, options, activations):
    """Those of the straight-through dense product, however little precision that of
    the quantized model has."""
    format = Ternary(precision="default")
    linear, x, ct = eqx.nn.Linear(96, 64, key=KEY), normal(40, 96), normal(40, 64)

    @eqx.filter_jit
    def gradients(wrapped, x):
        loss = lambda both: jnp.sum(jax.vmap(both[0])(both[1]) * ct)
        return jax.tree.leaves(eqx.filter_grad(loss)((wrapped, x)))

    dense = eqquant.FakeQuantized(linear, format, **options)
    if activations == "int8":
        *of_weights, _ = gradients(dense, eqquant.round_activations(x))
        expected = [*of_weights, gradients(dense, x)[-1]]
        format = Ternary(precision="default", activations="int8")
    else:
        expected = gradients(dense, x)
    ours, _ = both(linear, format, **options)
    for a, b in zip(gradients(ours, x), expected, strict=True):
        assert relative(a, b) < 1e-6


def test_convolutions_and_other_functions_under_quaxify():
    """As later the quantized model."""
    wrapped, quantized = both(Mixed(), W8A8, rules={"conv.*": "nf4"})
    run = eqx.filter_jit(lambda model: eqquant.quaxify(model)(TOKENS))
    assert_identical(run(wrapped.fake_quantized()), run(quantized))
    gradients = eqx.filter_jit(
        eqx.filter_grad(lambda w: scalar(eqquant.quaxify(w.fake_quantized()), TOKENS))
    )(wrapped)
    assert all(jnp.any(x != 0) for x in jax.tree.leaves(gradients))
    with pytest.raises(TypeError):
        wrapped(TOKENS)


#
# Activations
#


def test_activations_are_rounded_per_token(normal):
    x = normal(3, 5, 40) * 10
    rounded = eqquant.round_activations(x)
    unit = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    np.testing.assert_allclose(rounded, np.round(x / unit) * unit, rtol=1e-5)
    assert len(np.unique(np.asarray(rounded / unit)[0, 0].round(3))) > 20
    other = eqquant.round_activations(x.swapaxes(0, 2), axis=0)
    assert_identical(other.swapaxes(0, 2), rounded)
    ct = normal(3, 5, 40)
    (gradient,) = jax.vjp(jax.jit(eqquant.round_activations), x)[1](ct)
    assert_identical(gradient, ct)
    assert eqquant.round_activations(x.astype("bfloat16")).dtype == jnp.bfloat16
    assert eqquant.round_activations(jnp.zeros((2, 0))).shape == (2, 0)
    with pytest.raises(ValueError, match="axis must be between -1 and 0"):
        eqquant.round_activations(jnp.ones(4), axis=1)


@pytest.mark.parametrize("format", [W8A8, Ternary(activations="int8")])
def test_a_model_with_int8_activations(format):
    model, x = mlp(), jax.random.normal(KEY, (8, 64))
    forward = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
    wrapped = eqquant.FakeQuantized(model, format)
    # As the integers that are multiplied later, up to float32 rounding: which may move
    # an activation of a later layer to the next integer.
    assert relative(forward(wrapped, x), forward(wrapped.quantized(), x)) < 1e-2
    one = eqquant.FakeQuantized(model.layers[0], format)
    assert relative(forward(one, x), forward(one.quantized(), x)) < 1e-6
    # Far from what unrounded activations give.
    plain = eqquant.dequantize_tree(one.quantized())
    assert relative(forward(one, x), forward(plain, x)) > 1e-3

    gradient = eqx.filter_grad(lambda model, x: jnp.sum(jax.vmap(model)(x) ** 2))
    of_weight = gradient(one, x).model.weight
    rounded = eqquant.round_activations(x)
    expected = 2 * forward(one, x).T @ rounded
    assert relative(of_weight, expected) < 1e-5


def test_int8_activations_in_every_layer_with_products():
    """Attention, recurrent cells, a scan over stacked layers, remat: and the model code
    is as it was. Convolutions are left out by a rule."""
    format = Ternary(activations="int8")
    model = eqquant.FakeQuantized(Mixed(), format, rules={"conv.*": "int8"})
    later = eqquant.quaxify(eqx.filter_jit(lambda m: m(TOKENS)))(model.quantized())
    assert relative(eqx.filter_jit(model)(TOKENS), later) < 2e-2
    gradients = eqx.filter_jit(
        eqx.filter_grad(lambda model: jnp.sum(model(TOKENS) ** 2))
    )(model)
    assert all(jnp.any(x != 0) for x in jax.tree.leaves(gradients))


def test_operators_of_a_weight_that_rounds(normal):
    linear = eqx.nn.Linear(64, 32, use_bias=False, key=KEY)
    fake = eqquant.fake_quantize_tree(linear, W8A8).weight
    q = eqquant.quantize(linear.weight, W8A8)
    x = normal(5, 64)
    assert (fake.shape, fake.ndim, fake.size, len(fake)) == ((32, 64), 2, 2048, 32)
    for use in (
        lambda w: x @ w.T,
        lambda w: w @ x.T,
        lambda w: w @ x[0],
        lambda w: np.asarray(x) @ w.mT,
        lambda w: w[3],
        lambda w: w.transpose(1, 0)[:, :4].T @ x[0],
        lambda w: w.reshape(2, 16, 64)[1] @ x[0],
        lambda w: w.astype("bfloat16") @ x[0].astype("bfloat16"),
    ):
        assert use(fake).dtype == use(q).dtype
        assert relative(use(fake), use(q)) < (
            1e-6 if use(q).dtype == jnp.float32 else 1e-2
        )
    for wrong in (jnp.exp, np.asarray):
        with pytest.raises(TypeError):
            wrong(fake)


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
# Errors, each of which names the way out
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
    with pytest.raises(ValueError, match=r"scales that were learned.*\.quantized\(\)"):
        eqquant.quantize_tree(learned, "int8")(jnp.ones(64))


def test_codes_that_an_optimiser_has_changed(default_format):
    """As it was given arrays of any dtype, and gradients of as many."""
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
        with pytest.raises(TypeError, match=r"lost a part of itself.*eqx\.combine"):
            part(jnp.ones(64))


def test_nothing_to_train_quantized():
    quantized = eqquant.quantize_tree(mlp(), "nf4")
    for model, options in (
        (quantized, {}),
        (mlp(), {"min_size": 10**6}),
        (mlp(), {"rules": {"*": None}}),
    ):
        for make in (eqquant.fake_quantize_tree, eqquant.FakeQuantized):
            with pytest.raises(ValueError, match=r"no weight is chosen.*report"):
                make(model, "int8", **options)


def test_bad_arguments():
    model = mlp()
    for make in (eqquant.fake_quantize_tree, eqquant.FakeQuantized):
        name = make.__name__
        with pytest.raises(ValueError, match="format must be one of"):
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
        eqquant.fake_quantize_tree(broken)
    whole = eqx.tree_at(weight, model, jnp.ones((64, 64), int))
    with pytest.raises(TypeError, match=r"at layers\.1\.weight:.*got int32: only the"):
        eqquant.fake_quantize_tree(whole, rules={"layers.1.weight": "int8"})
    wrapped = eqquant.FakeQuantized(model)
    fewer = eqx.tree_at(lambda w: w.model.layers, wrapped, model.layers[1:])
    with pytest.raises(ValueError, match="another structure.*Wrap it anew"):
        fewer(jnp.ones(64))
