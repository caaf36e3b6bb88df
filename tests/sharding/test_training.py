"""Quantization-aware training over 8 devices: results of one, and collectives."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives, largest_float
from eqquant import NF4
from eqquant.kernels.cpu import _library
from helpers import relative
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


M, SIZE = 8, 256
SUMS = 1e-6  # Float32 sums in another order.
EXACT = {"format": NF4(), "precision": "highest"}
RULES = {"*layers.0.*": P("m"), "*layers.1.weight": P(None, "m")}


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("d", "m"), axis_types=(kind,) * 2)


def mlp():
    return eqx.nn.MLP(SIZE, SIZE, SIZE, 1, key=jax.random.key(0))


def gradient(of_parts, static):
    def loss(parts, x):
        return jnp.mean(jax.vmap(of_parts(eqx.combine(parts, static)))(x) ** 2)

    return jax.jit(jax.grad(loss))


def quantized_in_the_loss(split):
    """Return a loss that makes a plan in each step."""
    make = lambda model: split(
        eqquant.training.fake_quantize_tree(model, **EXACT, quantized_products=True)
    )
    return mlp(), make


def wrapped(split):
    """Return a loss with the plan of the wrapper."""
    model = eqquant.FakeQuantized(mlp(), **EXACT, quantized_products=True)
    return model, lambda model: model


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("how", [wrapped, quantized_in_the_loss])
def test_products_are_those_of_kernels(how, kind, normal):
    mesh = mesh_of(kind)
    split = lambda model: eqquant.shard_tree(model, mesh, rules=RULES, batch="d")
    model, make = how(split)
    parts, static = eqx.partition(split(model), eqx.is_array)
    x = normal(M, SIZE)
    with jax.set_mesh(mesh):
        args = parts, jax.device_put(x, NamedSharding(mesh, P("d")))
        compiled = gradient(make, static).lower(*args).compile()
        got = compiled(*args)
    assert not any(kind == "all-gather" for kind, _ in collectives(compiled))
    if not isinstance(_library.load(), str):
        assert "eqquant_dot" in compiled.as_text()
    model, make = how(lambda model: model)
    expected = gradient(make, eqx.partition(model, eqx.is_array)[1])
    expected = expected(eqx.filter(model, eqx.is_array), x)
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert relative(a, b) < 5 * SUMS


def test_fsdp_gathers_codes_of_what_was_just_quantized(normal):
    mesh = mesh_of(AxisType.Auto)
    model = eqquant.FakeQuantized(mlp(), **EXACT, quantized_products=True)
    model = eqquant.shard_tree(
        model, mesh, rules={"*.weight": P(("m", "d"))}, batch="d"
    )
    parts, static = eqx.partition(model, eqx.is_array)
    run = jax.jit(lambda parts, x: jax.vmap(eqx.combine(parts, static))(x))
    x = jax.device_put(normal(M, SIZE), NamedSharding(mesh, P("d")))
    compiled = run.lower(parts, x).compile()
    assert ("all-gather", "u8") in collectives(compiled)
    assert largest_float(compiled) < SIZE * SIZE / 2
    after = model.quantized()
    assert after.layers[0].weight.plan.axes == (("m", "d"), ())
    alone = eqquant.FakeQuantized(mlp(), **EXACT, quantized_products=True).quantized()
    weights = (after.layers[0].weight, alone.layers[0].weight)
    np.testing.assert_array_equal(*(w.codes for w in weights))
    assert relative(run(parts, x), jax.vmap(alone)(np.asarray(x))) < SUMS


def test_a_split_that_the_quantized_weights_will_not_have():
    model = eqquant.FakeQuantized(mlp(), "nf4", quantized_products=True)
    mesh = jax.sharding.AbstractMesh((8,), ("m",), axis_types=(AxisType.Auto,))
    model = eqx.filter_eval_shape(lambda: model)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.weight.*between blocks"):
        eqquant.shard_tree(model, mesh, rules={"*.weight": P(None, "m")})
