"""`eqx.nn` layers run unchanged on quantized weights, and decode none in full."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import (
    assert_close,
    assert_identical,
    dense,
    KINDS,
    pairs,
    quantize_weights,
    strict,
)


KEY = jax.random.key(0)

# Odd sizes, so that blocks, tiles and bytes are padded.
LAYERS = {
    "Linear": (eqx.nn.Linear(67, 41, key=KEY), [(67,)]),
    "MLP": (eqx.nn.MLP(67, 41, 53, 2, key=KEY), [(67,)]),
    "GRUCell": (eqx.nn.GRUCell(67, 41, key=KEY), [(67,), (41,)]),
    "LSTMCell": (eqx.nn.LSTMCell(67, 41, key=KEY), [(67,), ((41,), (41,))]),
    "MultiheadAttention": (
        eqx.nn.MultiheadAttention(2, 62, key=KEY),
        [(7, 62), (5, 62), (5, 62)],
    ),
    "Sequential": (
        eqx.nn.Sequential(
            [
                eqx.nn.Linear(67, 41, key=KEY),
                eqx.nn.LayerNorm(41),
                eqx.nn.Lambda(jax.nn.gelu),
                eqx.nn.Linear(41, 13, key=KEY),
            ]
        ),
        [(67,)],
    ),
}


def inputs(shapes, normal, *batch):
    def make(shape):
        if isinstance(shape[0], tuple):
            return tuple(map(make, shape))
        return normal(*batch, *shape)

    return [make(shape) for shape in shapes]


def check(fn, layer, *args):
    assert_close(fn(layer, *args), eqx.filter_jit(fn)(dense(layer), *args))
    eqquant.debug.assert_not_materialised(fn, layer, *args)


def plain(layer, *args):
    return layer(*args)


def vmap_jit_grad_and_checkpoint(layer, *args):
    @eqx.filter_jit
    def loss(layer, *args):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(jax.vmap(layer)(*args)))

    return jax.grad(lambda args: eqx.filter_checkpoint(loss)(layer, *args))(args)


def nested_vmap_and_scan(layer, *args):
    def step(carry, args):
        return carry, jax.vmap(jax.vmap(layer))(*args)

    return jax.lax.scan(step, 0, args)[1]


# The batch axes of each layer.
USES = {
    "plain": (plain, ()),
    "vmap, jit, grad, checkpoint": (vmap_jit_grad_and_checkpoint, (3,)),
    "nested vmap, scan": (nested_vmap_and_scan, (2, 2, 3)),
}


@pairs("name, use, default_format", LAYERS, USES, KINDS)
def test_layers(name, use, default_format, normal):
    (layer, shapes), (fn, batch) = LAYERS[name], USES[use]
    layer = quantize_weights(layer, default_format)
    check(fn, layer, *inputs(shapes, normal, *batch))


def test_gradients_of_what_is_not_quantized(default_format, normal):
    layer = quantize_weights(LAYERS["MLP"][0], default_format)
    trainable, frozen = eqx.partition(layer, eqquant.trainable_mask(layer))
    x = normal(5, 67)

    def loss(trainable, frozen):
        return jnp.sum(jax.vmap(eqx.combine(trainable, frozen))(x) ** 2)

    grads = jax.grad(loss)(trainable, frozen)
    assert not jax.tree.leaves([linear.weight.scales for linear in grads.layers])
    expected = eqx.filter_grad(lambda m: jnp.sum(jax.vmap(m)(x) ** 2))(dense(layer))
    for a, b in zip(grads.layers, expected.layers, strict=True):
        assert_close(a.bias, b.bias)


def test_embedding(default_format, normal):
    layer = quantize_weights(eqx.nn.Embedding(97, 64, key=KEY), default_format)
    full = dense(layer)
    for i in (0, 96):
        assert_close(layer(i), full(i), 0)
        assert_close(layer(jnp.array(i)), full(i), 0)
    tokens = jnp.array([[3, 96], [0, 3]])
    lookup = lambda layer, tokens: jax.jit(jax.vmap(jax.vmap(layer)))(tokens)
    assert_close(lookup(layer, tokens), lookup(full, tokens), 0)
    eqquant.debug.assert_not_materialised(lookup, layer, tokens)


def test_stacked_layers(default_format, normal):
    keys = jax.random.split(KEY, 3)
    stacked = eqx.filter_vmap(lambda key: eqx.nn.Linear(53, 53, key=key))(keys)
    layer = eqquant.quantize_tree(stacked, default_format)
    x = normal(53)
    each = eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(eqx.if_array(0), None))
    check(each, layer, x)
    dynamic, static = eqx.partition(layer, eqx.is_array)

    def run(dynamic, x):
        step = lambda x, layer: (eqx.combine(layer, static)(x), None)
        return jax.lax.scan(step, x, dynamic)[0]

    eqquant.debug.assert_not_materialised(run, dynamic, x)


def test_the_walk_catches_a_materialisation(default_format, normal):
    layer = quantize_weights(LAYERS["Linear"][0], default_format)
    x = normal(67)
    with pytest.raises(eqquant.MaterialiseError, match="float32"):
        eqquant.debug.assert_not_materialised(
            lambda layer, x: dense(layer)(x), layer, x
        )


@pytest.mark.parametrize("half", ["trainable", "arrays"])
def test_halves_of_a_model_are_combined_inside(half, normal):
    """Training loops partition a model, and combine it inside of the loss."""
    layer = eqx.nn.Conv1d(16, 16, 3, key=KEY)
    layer, x = eqquant.quantize_tree(layer, "int8"), normal(16, 8)
    mask = eqx.is_array if half == "arrays" else eqquant.trainable_mask(layer)
    dynamic, static = eqx.partition(layer, mask)
    combined = lambda dynamic, static: eqx.combine(dynamic, static)(x)
    got = strict(combined)(dynamic, static)
    assert_identical(got, strict(layer)(x))
    if half == "trainable":
        loss = lambda dynamic: jnp.sum(strict(combined)(dynamic, static) ** 2)
        gradient = jax.jit(jax.grad(loss))(dynamic).bias
        assert_close(gradient, 2 * jnp.sum(got, 1, keepdims=True), 1e-5)


def test_parts_of_a_model_and_a_quantized_array_are_arguments():
    model = eqx.nn.Linear(64, 32, key=jax.random.key(0))
    quantized = eqquant.quantize_tree({"a": model, "b": model}, "int8")
    arrays, static = eqx.partition(quantized, eqx.is_array)
    leaves, treedef = jax.tree.flatten(arrays)
    x = jax.random.normal(jax.random.key(1), (64,))

    def fn(leaves, other):
        layers = eqx.combine(jax.tree.unflatten(treedef, leaves), static)
        return layers["a"](x) + layers["b"](x) + jnp.einsum("i,oi->o", x, other)

    other = quantized["a"].weight
    out = eqquant.quaxify(fn, on_materialise="error")(leaves, other)
    expected = 2 * quantized["a"](x) + other @ x
    assert_close(out, expected, 1e-5)
