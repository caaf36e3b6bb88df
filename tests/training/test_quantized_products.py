"""Training with quantized products and int8 activations."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Int8, NF4, Ternary
from helpers import assert_close, assert_identical, pairs, relative, slow
from models import KEY, Mixed, mlp, scalar, TOKENS


W8A8 = {"format": Int8(), "activations": "int8"}


def both(model, format, **options):
    """Return the model in training with quantized products, and the converted model."""
    options["quantized_products"] = True
    wrapped = eqquant.FakeQuantized(model, format, **options)
    return wrapped, wrapped.quantized()


# Every format, and several precisions.
PRODUCTS = [
    (NF4(), {}),
    (Ternary(), {"precision": "default", "activations": "int8"}),
    (eqquant.Binary(), {"precision": "default"}),
]
PRODUCTS += [
    pytest.param(*pair, marks=pytest.mark.slow)
    for pair in (
        (Int8(), {"activations": "int8"}),  # A test of all layers below is fast.
        (Int8(block_size=32), {"precision": "default"}),
        (NF4(double_quantization=True), {}),
        (NF4(), {"precision": "default"}),
        (Int8(), {}),
        (Int8(), {"precision": "highest"}),
        (Ternary(), {}),
    )
]


@pytest.mark.parametrize("format, compute", PRODUCTS, ids=repr)
def test_products_equal_the_quantized_model(normal, format, compute):
    """Equal bit for bit: single inputs and batches, eagerly and compiled."""
    wrapped, quantized = both(mlp(), format, **compute)
    batch = jax.vmap(lambda model, x: model(x), (None, 0))
    x = normal(40, 64)
    for fn in (lambda model, x: model(x[0]), batch):
        assert_identical(fn(wrapped, x), fn(quantized, x))
    compiled = eqx.filter_jit(batch)
    got, expected = compiled(wrapped, x), compiled(quantized, x)
    kernels = str(eqquant.debug.explain(batch, quantized, x))
    if "activations" in compute and "native kernel 'int8" not in kernels:
        # Without int8 instructions, XLA rounds activations. It fuses this with other
        # operations, which changes some results by a rounding of float32.
        assert_close(got, expected, 1e-6)
    else:
        assert_identical(got, expected)


@pytest.mark.parametrize(
    "options", [slow({"format": NF4(), "precision": "default"}), W8A8]
)
def test_products_in_every_layer(options):
    """Attention, a recurrent cell under a scan, a scan over stacked layers, remat."""
    wrapped, quantized = both(Mixed(), rules={"conv.*": None}, **options)
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


@pairs(
    "options, activations",
    [{}, {"clip": True}, {"learn_scales": True}],
    ["float", "int8"],
)
def test_gradients_of_quantized_products(normal, options, activations):
    """Gradients equal those of the straight-through dense product at any precision."""
    format, compute = Ternary(), {"precision": "default"}
    linear, x, ct = eqx.nn.Linear(96, 64, key=KEY), normal(40, 96), normal(40, 64)

    @eqx.filter_jit
    def gradients(wrapped, x):
        loss = lambda both: jnp.sum(jax.vmap(both[0])(both[1]) * ct)
        return jax.tree.leaves(eqx.filter_grad(loss)((wrapped, x)))

    dense = eqquant.FakeQuantized(linear, format, **options, **compute)
    if activations == "int8":
        *of_weights, _ = gradients(dense, eqquant.training.round_activations(x))
        expected = [*of_weights, gradients(dense, x)[-1]]
        compute["activations"] = "int8"
    else:
        expected = gradients(dense, x)
    ours, _ = both(linear, format, **options, **compute)
    for a, b in zip(gradients(ours, x), expected, strict=True):
        assert relative(a, b) < 1e-6


@pytest.mark.slow
def test_convolutions_and_other_functions_under_quaxify():
    """Results equal the quantized model."""
    wrapped, quantized = both(Mixed(), rules={"conv.*": "nf4"}, **W8A8)
    run = eqx.filter_jit(lambda model: eqquant.quaxify(model)(TOKENS))
    assert_identical(run(wrapped.fake_quantized()), run(quantized))
    gradients = eqx.filter_jit(
        eqx.filter_grad(lambda w: scalar(eqquant.quaxify(w.fake_quantized()), TOKENS))
    )(wrapped)
    assert all(jnp.any(x != 0) for x in jax.tree.leaves(gradients))
    # The layers of the quantized model, including convolutions, need no `quaxify`.
    assert_close(wrapped(TOKENS), run(quantized), 1e-3)


#
# Activations
#


def test_activations_are_rounded_per_token(normal):
    x = normal(3, 5, 40) * 10
    rounded = eqquant.training.round_activations(x)
    unit = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    np.testing.assert_allclose(rounded, np.round(x / unit) * unit, rtol=1e-5)
    assert len(np.unique(np.asarray(rounded / unit)[0, 0].round(3))) > 20
    other = eqquant.training.round_activations(x.swapaxes(0, 2), axis=0)
    assert_identical(other.swapaxes(0, 2), rounded)
    ct = normal(3, 5, 40)
    (gradient,) = jax.vjp(jax.jit(eqquant.training.round_activations), x)[1](ct)
    assert_identical(gradient, ct)
    assert (
        eqquant.training.round_activations(x.astype("bfloat16")).dtype == jnp.bfloat16
    )
    assert eqquant.training.round_activations(jnp.zeros((2, 0))).shape == (2, 0)
    with pytest.raises(ValueError, match="axis must be between -1 and 0"):
        eqquant.training.round_activations(jnp.ones(4), axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("format", [Int8(), slow(Ternary())])
def test_a_model_with_int8_activations(format):
    model, x = mlp(), jax.random.normal(KEY, (8, 64))
    forward = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
    wrapped = eqquant.FakeQuantized(model, format, activations="int8")
    # Equal to the integer products up to float32 rounding, which can move an activation
    # of a later layer to the next integer.
    assert relative(forward(wrapped, x), forward(wrapped.quantized(), x)) < 1e-2
    one = eqquant.FakeQuantized(model.layers[0], format, activations="int8")
    assert relative(forward(one, x), forward(one.quantized(), x)) < 1e-6
    # The results differ clearly from those with unrounded activations.
    plain = eqquant.dequantize_tree(one.quantized())
    assert relative(forward(one, x), forward(plain, x)) > 1e-3

    gradient = eqx.filter_grad(lambda model, x: jnp.sum(jax.vmap(model)(x) ** 2))
    of_weight = gradient(one, x).model.weight
    rounded = eqquant.training.round_activations(x)
    expected = 2 * forward(one, x).T @ rounded
    assert relative(of_weight, expected) < 1e-5


@pytest.mark.slow
def test_int8_activations_in_every_layer_with_products():
    """Attention, recurrent cells, a scan over stacked layers and remat work unchanged.
    A rule excludes convolutions."""
    how = {"rules": {"conv.*": "int8"}, "activations": "int8"}
    model = eqquant.FakeQuantized(Mixed(), "ternary", **how)
    later = eqquant.quaxify(eqx.filter_jit(lambda m: m(TOKENS)))(model.quantized())
    assert relative(eqx.filter_jit(model)(TOKENS), later) < 2e-2
    gradients = eqx.filter_jit(
        eqx.filter_grad(lambda model: jnp.sum(model(TOKENS) ** 2))
    )(model)
    assert all(jnp.any(x != 0) for x in jax.tree.leaves(gradients))


def test_operators_of_a_weight_that_rounds(normal):
    linear = eqx.nn.Linear(64, 32, use_bias=False, key=KEY)
    fake = eqquant.training.fake_quantize_tree(linear, **W8A8).weight
    q = eqquant.quantize(linear.weight, **W8A8)
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
