"""`LoraArray`: its value, and its use in JAX and Equinox."""

import functools as ft
from typing import Any

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import adapted, array, check, is_lora, KEY, MLP, perturb, stacked
from eqquant.arrays import Contraction
from helpers import assert_close, pairs, relative, slow, strict
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


@pytest.fixture(params=[slow(None), "nf4"], ids=str)
def format(request):
    """A format; None for adapters beside floats. Adapters are independent of
    formats."""
    return request.param


LAYERS = {
    "Linear": (eqx.nn.Linear(67, 41, key=KEY), [(67,)]),
    "GRUCell": (eqx.nn.GRUCell(67, 41, key=KEY), [(67,), (41,)]),
    "MultiheadAttention": (
        eqx.nn.MultiheadAttention(2, 62, key=KEY),
        [(7, 62), (5, 62), (5, 62)],
    ),
}


@pairs("format, alpha", [None, "nf4"], [None, 2.0])
def test_it_stands_for_the_sum(format, alpha, normal):
    scale = 1.0 if alpha is None else alpha / 4  # Divided by the rank.
    model = perturb(adapted(MLP, format, alpha=alpha))
    w = model.layers[0].weight
    assert (w.shape, w.a.shape, w.b.shape) == ((53, 67), (4, 67), (53, 4))
    base, a, b = (
        np.asarray(eqquant.dequantize(x), np.float64) for x in (w.base, w.a, w.b)
    )
    expected = base + scale * b @ a
    assert relative(w.dequantize(), expected) < 1e-6
    x = normal(67)
    assert relative(w @ x, expected @ np.asarray(x, np.float64)) < 1e-4
    assert relative(x @ w.T, expected @ np.asarray(x, np.float64)) < 1e-4
    check(lambda model, x: jax.vmap(model)(x), model, normal(5, 67))


def test_half_precision(normal):
    linear = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16), eqx.nn.Linear(64, 64, key=KEY)
    )
    model = perturb(adapted(linear, "nf4"))
    assert model.weight.a.dtype == jnp.float32
    x = normal(5, 64, dtype=jnp.bfloat16)
    out = jax.vmap(model)(x)
    assert out.dtype == jnp.bfloat16
    # The merged weight and the sum of two products are each rounded to 8 bits.
    assert relative(out, jax.vmap(eqquant.merge_lora(model))(x)) < 2e-2


#
# Layers and transformations
#


@pytest.mark.parametrize("name", [*map(slow, list(LAYERS)[:-1]), "MultiheadAttention"])
def test_layers_and_their_gradients(name, normal):
    layer, shapes = LAYERS[name]
    model = perturb(adapted(layer, "nf4"))
    inputs = [normal(3, *shape) for shape in shapes]

    def loss(model, *inputs):
        return jnp.sum(jnp.sin(jax.vmap(model)(*inputs)))

    check(lambda model, *x: jax.vmap(model)(*x), model, *inputs)
    dynamic, static = eqx.partition(model, eqx.is_array)

    def of_input(dynamic, *inputs):
        model = eqx.combine(dynamic, static)
        return jax.grad(lambda x: loss(model, x, *inputs[1:]))(inputs[0])

    assert_close(
        jax.jit(of_input)(dynamic, *inputs),
        jax.grad(loss, argnums=1)(eqquant.merge_lora(model), *inputs),
    )


def test_embeddings(format, normal):
    layer = eqx.nn.Embedding(97, 64, key=KEY)
    model = perturb(adapted(layer, format, rules={"weight": 4}))
    full = eqquant.merge_lora(model)
    tokens = jnp.array([[3, 96], [0, 3]])
    lookup = lambda layer: jax.jit(jax.vmap(jax.vmap(layer)))(tokens)
    assert_close(lookup(model), lookup(full), 1e-6)
    for i in (0, 96, jnp.array(5)):
        assert_close(model(i), full(i), 1e-6)
    # Only the selected rows are decoded.
    eqquant.debug.assert_not_materialised(lookup, model)


@pairs("format, groups", [None, "nf4"], [1, 2])
def test_convolutions(format, groups, normal):
    layer = eqx.nn.Conv2d(8, 16, 3, groups=groups, key=KEY)
    model = perturb(adapted(layer, format))
    assert model.weight.a.shape == (4, 8 // groups, 3, 3)
    assert model.weight.b.shape == (16, 4)
    images = normal(2, 8, 9, 9)
    expected = jax.vmap(eqquant.merge_lora(model))(images)
    assert_close(strict(jax.vmap(model))(images), expected)


@pytest.mark.slow
def test_the_dispatcher(format, normal):
    w = array(format, normal(24, 64))
    dense = w.dequantize()
    x, y = normal(5, 64), normal(5, 24)
    for spec, other in (("nk,bk->bn", x), ("nk,bk->nb", x), ("nk,bn->bk", y)):
        got = strict(lambda w, x: jnp.einsum(spec, w, x))(w, other)  # noqa: B023
        assert_close(got, jnp.einsum(spec, dense, other))
    moves = [
        lambda w: w.T,
        lambda w: w.reshape(4, 6, 64),
        lambda w: w[3:9],
        lambda w: w[::-1],
        lambda w: jnp.broadcast_to(w, (3, 24, 64)),
        lambda w: w[None],
        lambda w: jnp.stack([w, w]),
        lambda w: w.astype(jnp.bfloat16),
        lambda w: lax.cond(True, lambda w: w, lambda w: w[::-1], w),
        lax.stop_gradient,
    ]
    for move in moves:
        got = strict(move)(w)
        assert is_lora(got)
        # The sum is rounded to bfloat16 at different places.
        assert_close(got.dequantize(), move(dense), 4e-3)
    with pytest.warns(eqquant.arrays.MaterialiseWarning):
        assert_close(eqquant.quaxify(jnp.exp)(w), jnp.exp(dense), 1e-5)


def test_a_rule_of_the_user_is_for_quantized_arrays(normal):
    from eqquant.dispatch.rules import _registry

    before = {name: list(rules) for name, rules in _registry._rules.items()}
    try:
        eqquant.register(lax.exp_p)(lambda q, **_: q.replace(scales=-q.scales))
        w = perturb(adapted(eqx.nn.Linear(64, 64, key=KEY), "nf4")).weight
        with pytest.raises(eqquant.MaterialiseError):
            strict(jnp.exp)(w)
        assert eqquant.is_quantized(strict(jnp.exp)(w.base))
    finally:
        _registry._rules.clear()
        _registry._rules.update(before)


def test_indexing_and_transposing_keep_it(format, normal):
    w = array(format, normal(5, 7, 64))
    dense = w.dequantize()
    for index in (2, slice(1, 4), (slice(None), 3), (1, 2), jnp.array([3, 0]), None):
        got: Any = w[index]
        assert_close(
            eqquant.dequantize(got) if not is_lora(got) else got.dequantize(),
            dense[index],
            1e-6,
        )
    for axes in ((2, 0, 1), (1, 2, 0), (0, 2, 1)):
        # The product of the factors is transposed as well, so sums may be reordered.
        assert_close(w.transpose(axes).dequantize(), dense.transpose(axes), 1e-6)


@pytest.mark.slow
def test_stacked_layers(format, normal):
    layers = stacked(format)
    assert layers.weight.a.shape == (3, 4, 53) and layers.weight.b.shape == (3, 53, 4)
    x = normal(53)

    def scan(layers, x):
        dynamic, static = eqx.partition(layers, eqx.is_array)
        step = lambda x, layer: (jnp.tanh(eqx.combine(layer, static)(x)), None)
        return lax.scan(jax.checkpoint(step), x, dynamic)[0]

    check(scan, layers, x)
    each = eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(eqx.if_array(0), None))
    check(each, layers, x)
    products = strict(lambda w, x: jnp.einsum("lnk,bk->lbn", w, x))
    assert_close(
        products(layers.weight, x[None]),
        jnp.einsum("lnk,bk->lbn", layers.weight.dequantize(), x[None]),
    )
    w = layers.weight
    assert_close(
        w[jnp.array([2, 0])].dequantize(), w.dequantize()[jnp.array([2, 0])], 0
    )


def test_ragged_dot(normal):
    w = array("int8", normal(4, 64, 32), axis=1)
    x, sizes = normal(30, 64), jnp.array([10, 0, 15, 5])
    got = strict(lambda w: lax.ragged_dot(x, w, sizes))(w)
    assert_close(got, lax.ragged_dot(x, w.dequantize(), sizes))


def test_parts_are_split_as_the_weight_is(normal):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    w = array("nf4", normal(16, 1024))
    for spec, a, b in (
        (P("x"), P(None, None), P("x", None)),
        (P(None, "x"), P(None, "x"), P(None, None)),
    ):
        parts = w.split_specs(spec, mesh)
        assert (parts.a, parts.b) == (a, b)
        assert parts.base.codes == P(*spec, *[None] * (2 - len(spec)))
    # Two blocks per row cannot be split over eight devices.
    assert (
        array("nf4", normal(16, 128)).split_specs(P(None, "x"), mesh) is NotImplemented
    )
    placed = strict(lambda w: jax.device_put(w, NamedSharding(mesh, P("x"))))(w)
    assert placed.b.sharding.spec == P("x", None) and is_lora(placed)


@pytest.mark.slow
def test_shard_map_and_placement(format, normal):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    w = array(format, normal(16, 512))
    dense, x = w.dequantize(), normal(8, 512)
    cases = [
        (P(), P("x"), P(None, "x"), lambda x, w: x @ w.T),
        (P(None, "x"), P(None, "x"), P(), lambda x, w: lax.psum(x @ w.T, "x")),
    ]
    for x_spec, w_spec, out_spec, local in cases:
        fn = jax.shard_map(
            local, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=out_spec
        )
        assert_close(strict(fn)(x, w), fn(x, dense))
        loss = lambda x, w, fn=fn: jnp.sum(jnp.sin(fn(x, w)))
        gradient = jax.grad(ft.partial(strict(loss), w=w))(x)
        assert relative(gradient, jax.grad(loss)(x, dense)) < 2e-3
    placed = strict(lambda w: jax.device_put(w, NamedSharding(mesh, P("x"))))(w)
    assert placed.b.sharding.spec == P("x", None) and is_lora(placed)


#
# Dropout
#


def test_dropout_is_of_the_adapter_alone_and_right_on_average(normal):
    linear = eqx.nn.Linear(64, 32, use_bias=False, key=KEY)
    model = perturb(adapted(linear, None, dropout=0.25))
    w, x = model.weight, normal(64)
    keys = jax.random.split(KEY, 4096)
    outs = jax.vmap(lambda key: eqquant.training.with_dropout_key(model, key)(x))(keys)
    adapter = outs - linear.weight @ x
    expected = w.scale * w.b @ (w.a @ x)
    # 4096 draws with dropout rate 1/4: an error of about one percent.
    assert relative(adapter.mean(0), expected) < 0.05
    # Each key, and each row of a batch, has its own mask.
    assert len(np.unique(np.asarray(outs), axis=0)) == 4096
    rows = jnp.broadcast_to(x, (6, 64)) @ w.T
    assert len(np.unique(np.asarray(rows[:, 0]))) == 6
    assert (
        len(np.unique(np.asarray(jax.vmap(lambda x: w @ x)(jnp.stack([x] * 6))[:, 0])))
        == 1
    )


def test_dropout_of_stacked_layers(normal):
    layers = stacked("nf4", dropout=0.5)
    assert layers.weight.key.shape == (3,)
    x = normal(53)
    dynamic, static = eqx.partition(layers, eqx.is_array)
    step = lambda x, layer: (eqx.combine(layer, static)(x), None)
    got = lax.scan(step, x, dynamic)[0]
    expected = x
    for i in range(3):
        layer = jax.tree.map(lambda a: a[i], dynamic)  # noqa: B023
        expected = eqx.combine(layer, static)(expected)
    assert_close(got, expected)
    batched = strict(lambda w, x: jnp.einsum("lnk,lk->ln", w, x))
    xs = normal(3, 53)
    each = jnp.stack([layers.weight[i] @ xs[i] for i in range(3)])
    assert_close(batched(layers.weight, xs), each)
    other = eqquant.training.with_dropout_key(layers, jax.random.key(5))
    assert relative(lax.scan(step, x, eqx.filter(other, eqx.is_array))[0], got) > 1e-2


def test_matrices_that_share_an_activation_share_its_mask(normal):
    w, x = stacked("nf4", dropout=0.5).weight, normal(53)
    got = strict(lambda w, x: jnp.einsum("lnk,k->ln", w, x))(w, x)
    key = w[0].key
    assert_close(got, jnp.stack([w[i].replace(key=key) @ x for i in range(3)]))


def test_products_have_the_dtype_that_is_asked_for(normal):
    w, x = array("nf4", normal(24, 64)), normal(3, 64)
    assert w.contract(x, Contraction([(1, 1)])).dtype == jnp.float32
    narrow = w.contract(x, Contraction([(1, 1)], out_dtype=jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16


@pytest.mark.parametrize("format", [None, "nf4"])
def test_rows_that_the_dispatcher_takes(format, normal):
    take = lambda w: jnp.take(w, jnp.array([2, 0, 2]), axis=0)
    w = array(format, normal(24, 64))
    assert_close(strict(take)(w), take(w.dequantize()))
