"""Convolutions with a quantized weight run without `quaxify`."""

import copy
import io
import pickle

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, assert_identical, pairs, slow
from jax import lax


KEY = jax.random.key(0)


class Branded(eqx.nn.Conv2d):
    """A user-defined layer."""

    def __call__(self, x, *, key=None):
        return 2 * super().__call__(x)


class Convolution(eqx.Module):
    """A convolution with the fields of `eqx.nn.Conv2d`, and its own `__call__`."""

    weight: jax.Array
    num_spatial_dims: int = 2
    kernel_size: tuple[int, int] = (3, 3)
    in_channels: int = 16

    def __call__(self, x):
        return lax.conv_general_dilated(x[None], self.weight, (1, 1), "SAME")[0]


class Padded(eqx.Module):
    """A convolution with only a weight and its padding."""

    weight: jax.Array
    padding: str = "SAME"
    in_channels: int = 16
    dims: int = 1

    @property
    def num_spatial_dims(self):
        return self.dims

    def __call__(self, x):
        return lax.conv_general_dilated(x[None], self.weight, (1,), self.padding)[0]


LAYERS = {
    "by fields": lambda: Convolution(jax.random.normal(KEY, (32, 16, 3, 3)) / 12),
    "by padding": lambda: Padded(jax.random.normal(KEY, (32, 16, 3)) / 7),
    "Conv1d": lambda: eqx.nn.Conv1d(16, 32, 3, key=KEY),
    "Conv2d": lambda: eqx.nn.Conv2d(16, 32, 3, padding="SAME", stride=2, key=KEY),
    "Conv3d": lambda: eqx.nn.Conv3d(16, 32, 2, use_bias=False, key=KEY),
    "Conv": lambda: eqx.nn.Conv(2, 64, 32, 3, groups=2, key=KEY),
    "ConvTranspose2d": lambda: eqx.nn.ConvTranspose2d(16, 32, 3, stride=2, key=KEY),
    "subclass": lambda: Branded(16, 32, 3, key=KEY),
}


def image(layer):
    return jax.random.normal(KEY, (layer.in_channels, *(9,) * layer.num_spatial_dims))


SLOW = ("Conv3d", "Conv", "subclass", "by padding")
NAMES = [slow(name) if name in SLOW else name for name in LAYERS]


@pairs("name, format", NAMES, ["int8", "nf4", "ternary", "binary"])
def test_a_convolution_is_called_as_it_was(name, format):
    layer = LAYERS[name]()
    q, x = eqquant.quantize_tree(layer, format), image(layer)
    assert isinstance(q, type(layer)) and type(q).__name__ == type(layer).__name__
    assert eqquant.is_quantized(q.weight)
    dense = eqquant.dequantize_tree(q)
    assert type(dense) is type(layer)
    batch = jnp.stack([x, -x])
    expected = jax.jit(jax.vmap(dense))(batch)
    assert_close(q(x), expected[0], 1e-4)
    assert_close(jax.jit(jax.vmap(q))(batch), expected, 1e-4)
    gradient = eqx.filter_jit(jax.grad(lambda x, layer: jnp.sum(jnp.sin(layer(x)))))
    # The gradient has two products in a row.
    assert_close(gradient(x, q), gradient(x, dense), 2e-4)
    # Inside of `quaxify`, the layer needs no dispatch of its own.
    strict = eqquant.quaxify(jax.vmap(q), on_materialise="error")
    assert_close(jax.jit(strict)(batch), expected, 1e-4)


def test_the_report_says_where_short_rows_cost_much():
    conv = eqx.nn.Conv2d(32, 32, 3, groups=32, key=KEY)
    rows = [eqquant.quantize_tree(m, "int8") for m in (conv, LAYERS["Conv2d"]())]
    depthwise, ordinary = (eqquant.report(q).rows[0] for q in rows)
    assert depthwise.bits > 11 and depthwise.reason.startswith("short rows")
    assert ordinary.bits < 8.3 and ordinary.reason == ""


def test_such_a_layer_is_a_pytree_like_any_other():
    q = eqquant.quantize_tree(LAYERS["Conv2d"](), "nf4")
    copies = [jax.tree.map(lambda x: x, q), pickle.loads(pickle.dumps(q))]
    copies += [copy.copy(q), copy.deepcopy(q), eqx.combine(*eqx.partition(q, False))]
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, q)
    file.seek(0)
    copies.append(eqx.tree_deserialise_leaves(file, q))
    for each in copies:
        assert type(each) is type(q)
        assert eqx.tree_equal(each, q)
    assert repr(q).startswith("Conv2d(\n  num_spatial_dims=2,\n  weight=nf4:f32[")
    again = eqquant.quantize_tree(LAYERS["Conv2d"](), "nf4")
    assert type(again) is type(q)
    (row,) = (row for row in eqquant.report(q).rows if row.path == "weight")
    assert row.format == eqquant.NF4()
    # The weight is removed and replaced by floats.
    dense = eqx.tree_at(lambda q: q.weight, q, q.weight.dequantize())
    assert_identical(dense(image(q)), eqquant.dequantize_tree(q)(image(q)))


@pytest.mark.slow
def test_in_a_model_with_an_adapter_and_in_training():
    class Model(eqx.Module):
        conv: eqx.nn.Conv2d
        norm: eqx.nn.GroupNorm

        def __call__(self, x):
            return self.norm(jax.nn.relu(self.conv(x)))

    model = Model(LAYERS["Conv2d"](), eqx.nn.GroupNorm(4, 32))
    x = image(model.conv)
    q = eqquant.quantize_tree(model, "int8")
    assert type(q) is Model and type(q.norm) is eqx.nn.GroupNorm
    adapted = eqquant.lora_tree(q, 4, key=KEY)
    assert_close(adapted(x), q(x), 1e-6)
    trainable, frozen = eqx.partition(adapted, eqquant.trainable_mask(adapted))
    loss = lambda trainable: jnp.sum(eqx.combine(trainable, frozen)(x) ** 2)
    assert jnp.any(eqx.filter_grad(loss)(trainable).conv.weight.b != 0)
    merged = eqquant.merge_lora(adapted)
    assert type(merged.conv) is eqx.nn.Conv2d

    # A quantized product in training.
    training = eqquant.FakeQuantized(model, "int8", activations="int8")
    later = training.quantized()
    assert_close(training(x), later(x), 1e-5)
    gradient = eqx.filter_grad(lambda m: jnp.sum(m(x) ** 2))(training)
    assert jnp.any(gradient.model.conv.weight != 0)


def test_without_such_a_layer_the_error_leads_to_quaxify():
    # A weight that was inserted by hand.
    layer = LAYERS["Conv2d"]()
    q = eqquant.quantize(layer.weight, "int8")
    layer = eqx.tree_at(lambda layer: layer.weight, layer, q)
    with pytest.raises(TypeError, match="QuantizedArray"):
        layer(image(layer))
    out = eqquant.quaxify(layer)(image(layer))
    assert_close(out, eqquant.dequantize_tree(layer)(image(layer)), 1e-4)
