"""`calibrate` over 8 devices gives the statistics of one device."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


# Relative to the largest sum: the order of float32 sums differs.
EXACT = 1e-6
KINDS = [AxisType.Auto, AxisType.Explicit]


def split_over(mesh, model, specs):
    """Return the model with the weights in `specs` sharded."""
    for name, spec in specs.items():
        where = lambda m, name=name: getattr(m, name).weight
        put = lambda w, spec=spec: jax.device_put(w, NamedSharding(mesh, spec))
        model = eqx.tree_at(where, model, replace_fn=put)
    return model


def assert_same_over_a_mesh(kind, forward, model, batches, specs):
    expected = eqquant.calibrate(forward, model, batches)
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        model = split_over(mesh, model, specs)
        batches = jax.device_put(batches, NamedSharding(mesh, P("d")))
        stats = eqquant.calibrate(forward, model, batches)
    assert list(stats.weights) == list(expected.weights)
    for path, one in expected.weights.items():
        known = stats.weights[path]
        assert known.rows == one.rows > 0
        for got, wanted in ((known.gram, one.gram), (known.power, one.power)):
            assert len(got.sharding.device_set) == mesh.size
            error = np.max(np.abs(np.asarray(got) - np.asarray(wanted)))
            assert error <= EXACT * np.max(np.abs(wanted))
    return stats


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.up = eqx.nn.Linear(16, 32, key=a)
        self.down = eqx.nn.Linear(32, 16, key=b)

    def __call__(self, x, mask):
        x = x + jax.vmap(self.down)(jnp.tanh(jax.vmap(self.up)(x)))
        return jnp.where(mask[:, None], x, 0)


# Like Megatron: columns, then rows.
SPLIT = {"up": P("m"), "down": P(None, "m")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("specs", [SPLIT, slow({})])
def test_products(kind, specs, normal):
    model = Block(jax.random.key(0))
    rng = np.random.default_rng(0)
    batches = [(normal(8, 6, 16), rng.random((8, 6)) < 0.8) for _ in range(2)]
    forward = lambda model, batch: jax.vmap(model)(*batch)
    stats = assert_same_over_a_mesh(kind, forward, model, batches, specs)
    assert stats.weights["up.weight"].rows == sum(mask.sum() for _, mask in batches)


class Table(eqx.Module):
    words: eqx.nn.Embedding


# With explicit axes, JAX rejects a lookup in a dense table by sharded tokens.
@pytest.mark.parametrize("spec", [P("m"), slow(P(None, "m"))])
def test_rows_that_are_looked_up(spec):
    model = Table(eqx.nn.Embedding(64, 16, key=jax.random.key(0)))
    tokens = np.random.default_rng(0).integers(0, 64, (2, 8, 6), np.int32)
    forward = lambda model, x: jnp.tanh(jax.vmap(jax.vmap(model.words))(x))
    specs = {"words": spec}
    assert_same_over_a_mesh(AxisType.Auto, forward, model, list(tokens), specs)
