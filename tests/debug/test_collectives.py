"""`collectives`, and the paths and counts in `explain`."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec as P


# A mesh of 2 by 4 devices: 64 outputs, 512 inputs, 8 rows.
MOVED = {
    "by outputs": (P("m"), None, set()),
    "by inputs": (P(None, "m"), None, {("all-reduce", "f32", (4, 64), 4 * 64 * 4)}),
    "gathered": (
        P("m", "d"),
        "d",
        {
            ("all-gather", "u8", (16, 256), 16 * 256),
            ("all-gather", "f32", (16, 8), 16 * 8 * 4),
        },
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_collectives_of_a_product(name, normal):
    spec, batch, expected = MOVED[name]
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
    q = eqquant.quantize(normal(64, 512), "nf4")
    q = eqquant.shard_tree(q, mesh, spec, batch=batch)
    fn, x = lambda x, q: x @ q.T, jnp.ones((8, 512))
    found = eqquant.debug.collectives(fn, x, q)
    assert set(map(tuple, found)) == expected
    assert found == sorted(found, key=lambda c: -c.nbytes)
    # Gathering packed codes is not decoding.
    eqquant.debug.assert_not_materialised(fn, x, q)


def test_explain_counts_products_and_names_weights():
    mlp = eqx.nn.MLP(64, 64, 64, 2, key=jax.random.key(0))
    q = eqquant.quantize_tree(mlp, rules={"layers.2.weight": "int8"})
    call = lambda model, x: jax.vmap(model)(x)
    text = eqquant.debug.explain(eqx.filter_jit(call), q, jnp.ones((4, 64)))
    first, second = text.splitlines()
    assert first.endswith("[2 products: layers.0.weight, layers.1.weight]")
    assert "NF4" in first and "Int8" in second
    assert second.endswith("[layers.2.weight]")


def test_explain_follows_weights_into_loops(normal):
    q = eqquant.quantize(normal(3, 64, 64), "nf4")

    def layers(x, q):
        return jax.lax.scan(lambda x, q: (jnp.tanh(x @ q.T), None), x, q)[0]

    text = eqquant.debug.explain(layers, jnp.ones((4, 64)), q)
    assert text.endswith("[argument 1]")
