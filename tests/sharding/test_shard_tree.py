"""`shard_tree`: specs, rules, errors, and the propagation of plans."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def model():
    model = eqx.nn.MLP(128, 256, 256, 1, key=jax.random.key(0))
    return model, eqquant.quantize_tree(model, "nf4")


def shard_shapes(x):
    return {s.data.shape for s in x.addressable_shards}


def test_specs_of_the_dense_model(mesh, model):
    dense, quantized = model
    specs = jax.tree.map(lambda x: P("m") if eqx.is_array(x) else None, dense)
    split = eqquant.shard_tree(quantized, mesh, specs)
    weight = split.layers[0].weight
    assert shard_shapes(weight.codes) == {(64, 64)}
    assert shard_shapes(weight.scales) == {(64, 2)}
    assert shard_shapes(split.layers[0].bias) == {(64,)}
    assert weight.plan.axes == (("m",), ()) and weight.plan.batch == ("d",)
    # Gathered mesh axes come last, independent of their order in the spec.
    split = eqquant.shard_tree(quantized, mesh, P(("d", "m")), batch="d")
    assert split.layers[0].weight.plan.axes[0] == ("m", "d")
    assert split.layers[0].weight.codes.sharding.spec[0] == ("m", "d")


def test_one_array_and_arrays_in_others(mesh, normal):
    q = eqquant.quantize(normal(64, 256), "int8")
    assert eqquant.shard_tree(q, mesh, P(None, "m")).plan.axes == ((), ("m",))
    tree = eqquant.lora_tree({"w": q}, 4, rules={"w": 4}, key=jax.random.key(0))
    lora = eqquant.shard_tree(tree, mesh, {"w": P("m", "d")}, batch="d")["w"]
    assert lora.base.plan.axes == (("m",), ("d",))
    assert shard_shapes(lora.a) == {(4, 16)} and shard_shapes(lora.b) == {(128, 4)}
    assert eqquant.shard_tree(jnp.ones(8), mesh, P("m")).sharding.spec == P("m")


def test_a_plan_travels(mesh, normal):
    q = eqquant.quantize(normal(4, 64, 256), "int8")
    q = eqquant.shard_tree(q, mesh, P("d", "m", None))
    axes = lambda q: q.plan.axes
    assert axes(q.mT) == axes(q.astype("bfloat16")) == (("d",), ("m",), ())
    assert axes(q.swapaxes(0, 1)) == (("m",), ("d",), ())
    assert axes(q[1]) == (("m",), ())
    assert axes(q[None]) == ((), ("d",), ("m",), ())
    assert axes(q.reshape(256, 256)) == (("d",), ())  # Other splits would cut blocks.
    assert axes(q.reshape(4, 8, 8, 256)) == (("d",), ("m",), (), ())
    assert axes(q[jnp.asarray([0, 2])])[-1] == ()
    assert jax.tree.map(lambda a: a[0], q).plan.of(2) == [("m",), ()]


def test_abstract_arrays(model):
    _, quantized = model
    mesh = AbstractMesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
    abstract = eqx.filter_eval_shape(lambda: quantized)
    split = eqquant.shard_tree(abstract, mesh, rules={"*.weight": P("m")})
    weight = split.layers[1].weight
    assert weight.codes.sharding.spec == P("m", None)
    assert weight.plan.mesh == mesh
    with pytest.raises(TypeError, match="abstract mesh"):
        eqquant.shard_tree(quantized, mesh)


def test_under_jit(mesh, normal):
    make = lambda w: eqquant.shard_tree(
        eqquant.quantize(w, "nf4"), mesh, P(None, "m"), batch="d"
    )
    q = jax.jit(make)(normal(64, 256))
    assert shard_shapes(q.codes) == {(64, 32)} and q.plan.axes == ((), ("m",))


WRONG = {
    "an unknown axis": ({"rules": {"w": P("z")}}, "w of shape .*'z', but the mesh has"),
    "twice": ({"rules": {"w": P("m", "m")}}, "twice"),
    "too many": ({"rules": {"b": P(None, "m")}}, "b of shape .*2 axes"),
    "through a block": (
        {"rules": {"w": P(None, ("d", "m"))}},
        "w of shape .*axis 1 .* 8 equal parts, over 'd' and 'm' .*blocks of 64; it can "
        "be in 1, 2, 4 parts",
    ),
    "uneven": ({"rules": {"b": P("m")}}, "axis 0 .* 4 equal .* 1, 2, 3, 6"),
    "a partial block": ({"rules": {"p": P(None, "m")}}, "axis 1 .*only be whole"),
    "both": ({"specs": P(), "rules": {}}, "not both"),
    "not a spec": ({"specs": "m"}, "PartitionSpec"),
    "not a prefix": ({"specs": {"x": P()}}, "prefix"),
    "rules as specs": ({"specs": {"*": P("d")}}, "Did you mean `rules={'\\*': P"),
    "no such batch": ({"batch": "z"}, "batch must name"),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_does_not_fit(how, mesh, normal):
    kwargs, message = WRONG[how]
    q, p = (eqquant.quantize(normal(16, n), "nf4") for n in (256, 100))
    with pytest.raises((ValueError, TypeError), match=message):
        eqquant.shard_tree({"w": q, "b": jnp.ones(6), "p": p}, mesh, **kwargs)


def test_a_block_that_a_shard_map_cuts(mesh, normal):
    fn = jax.shard_map(
        lambda x, q: x @ q.T, mesh=mesh, in_specs=P(None, "d"), out_specs=P()
    )
    q = eqquant.quantize(normal(16, 100), "nf4")
    with pytest.raises(ValueError, match="eqquant.shard_tree says what fits"):
        jax.eval_shape(fn, normal(4, 100), q)


def test_rules_that_match_nothing(mesh, normal):
    with pytest.warns(UserWarning, match="match nothing.*nope"):
        eqquant.shard_tree({"w": normal(4, 4)}, mesh, rules={"nope": P()})
