"""Quantized models in the checkpoints of other libraries."""

import io

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_identical


ocp = pytest.importorskip("orbax.checkpoint")


@pytest.fixture
def model():
    return eqx.nn.MLP(64, 16, 256, 2, key=jax.random.key(0))


FORMATS = ["int8", eqquant.NF4(double_quantization=True)]


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_equinox(model, format):
    quantized = eqquant.quantize_tree(model, format)
    buffer = io.BytesIO()
    eqx.tree_serialise_leaves(buffer, quantized)
    buffer.seek(0)
    skeleton = eqx.filter_eval_shape(eqquant.quantize_tree, model, format)
    assert_identical(eqx.tree_deserialise_leaves(buffer, skeleton), quantized)


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_orbax_onto_a_mesh(tmp_path, model, format):
    """A model saved from one device is restored with sharded weights."""
    arrays, functions = eqx.partition(
        eqquant.quantize_tree(model, format), eqx.is_array
    )
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def split(x):
        spec = jax.P("x") if x.ndim and x.shape[0] % 8 == 0 else jax.P()
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    skeleton = jax.tree.map(split, arrays)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", arrays)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "model", skeleton)
    assert_identical(restored, arrays)
    weight = restored.layers[1].weight
    assert weight.codes.sharding == jax.NamedSharding(mesh, jax.P("x"))
    x = jnp.ones(64)
    expected = eqx.combine(arrays, functions)(x)
    assert jnp.allclose(eqx.combine(restored, functions)(x), expected, atol=1e-5)


def test_orbax_from_one_mesh_onto_another(tmp_path, model):
    arrays, _ = eqx.partition(eqquant.quantize_tree(model, "nf4"), eqx.is_array)
    rules = {"layers.*.weight": jax.P("m"), "layers.1.bias": jax.P("d")}

    def split(tree, *shape):
        kinds = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.make_mesh(shape, ("d", "m"), axis_types=kinds)
        return eqquant.shard_tree(tree, mesh, rules=rules, batch="d")

    like = split(eqx.filter_eval_shape(lambda: arrays), 2, 4)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", split(arrays, 4, 2))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "model", like)
    assert_identical(restored, split(arrays, 2, 4))
    same = jax.tree.map(lambda a, b: a.sharding == b.sharding, restored, like)
    assert jax.tree.all(same)
