"""`save` and `load` restore trees bit for bit, or reject them with the path of the
leaf."""

import dataclasses
import json

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_identical
from safetensors import safe_open
from safetensors.numpy import load_file, save_file


def skeleton(tree):
    return eqx.filter_eval_shape(lambda: tree)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture
def model():
    key = jax.random.key(0)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(4, 16, 3, key=key),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Linear(64, 33, key=key),
            eqx.nn.Dropout(0.25),
        ]
    )


@pytest.mark.parametrize(
    "format",
    ["int8", eqquant.NF4(double_quantization=True), eqquant.Ternary(block_size=32)],
    ids=repr,
)
def test_a_quantized_model(path, model, format):
    quantized = eqquant.quantize_tree(model, format)
    eqquant.save(path, quantized)
    # `load` restores the class of the convolution, whatever `like` has.
    for like in (quantized, model, skeleton(quantized), skeleton(model)):
        loaded = eqquant.load(path, like)
        assert_identical(loaded, quantized)
        assert [type(layer) for layer in loaded] == [type(x) for x in quantized]
    weight = eqquant.load(path)["layers"]["0"]["weight"]
    assert_identical(weight, quantized[0].weight)


@pytest.mark.parametrize(
    "format",
    [
        eqquant.NF4(block_size=None, scale_dtype="bfloat16", fit="search"),
        eqquant.Int8(block_size=16),
        eqquant.Ternary(rule="absmean", least_squares=False),
    ],
    ids=repr,
)
def test_every_option_of_a_format(path, format, normal):
    q = eqquant.quantize(normal(2, 5, 70, dtype=jnp.bfloat16), format, axis=1)
    eqquant.save(path, q)
    assert_identical(eqquant.load(path), q)


def test_arrays_after_operations(path, normal):
    """Save arrays that are sliced, scaled, transposed, blocked along several axes, or
    empty."""
    q = eqquant.quantize(normal(3, 6, 130), "nf4")
    double = eqquant.quantize(normal(2, 1000), eqquant.NF4(double_quantization=True))
    tree = {
        "sliced": q[:, 2:4],
        "blocks": eqquant.quaxify(lambda w: w[..., :64])(q),
        "scaled": 0.5
        * eqquant.quantize(normal(3, 6), eqquant.Int8(scale_dtype="bfloat16")),
        "scaled double": -double,
        "transposed": q.transpose(2, 0, 1),
        "window": eqquant.quantize(normal(4, 3, 3, 3), "int8", axis=(1, 2, 3)),
        "tensor": eqquant.quantize(normal(4, 3), "ternary", axis=(0, 1)),
        "eight bits": q.astype("float8_e4m3fn"),
        "no rows": eqquant.quantize(normal(0, 64), "nf4"),
        "no columns": eqquant.quantize(normal(4, 0), "int8"),
    }
    eqquant.save(path, tree)
    assert_identical(eqquant.load(path), tree)


def test_trainable_arrays(path, model):
    key = jax.random.key(1)
    quantized = eqquant.quantize_tree(model, "nf4")
    adapted = eqquant.lora_tree(quantized, rank=2, key=key, dropout=0.1)
    trees = [
        adapted,
        eqquant.training.fake_quantize_tree(model, "int8", quantized_products=True),
        eqquant.FakeQuantized(model, "int8", learn_scales=True),
        # Only the adapters.
        eqx.partition(adapted, eqquant.trainable_mask(adapted))[0],
        eqx.partition(quantized, eqquant.trainable_mask(quantized))[0],
    ]
    for tree in trees:
        eqquant.save(path, tree)
        assert eqx.tree_equal(eqquant.load(path, tree), tree)
    eqquant.save(path, adapted)
    assert eqx.tree_equal(eqquant.load(path, model), adapted)


def leaves():
    key = jax.random.key(7)
    narrow = (
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3b11fnuz",
    )
    return {
        **{name: jnp.arange(6, dtype=name).reshape(2, 3) for name in narrow},
        **{
            f"np {name}": np.arange(6).astype(name)
            for name in ("i8", "u2", "f8", ">i4")
        },
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "bool": jnp.array([True, False]),
        "complex": jnp.array([1 + 2j]),
        "scalar": jnp.float32(3),
        "np scalar": np.float64(0.1),
        "empty": jnp.zeros((0, 3)),
        "key": key,
        "keys": jax.random.split(key, 3),
        "rbg": jax.random.key(0, impl="rbg"),
        "none": None,
        "function": jax.nn.relu,
        "numbers": [1, 10**40, True, 0.1, float("inf"), float("nan"), 1 + 2j, "é\n"],
        "nan": jnp.array([jnp.nan, jnp.inf, -0.0]),
    }


def raw(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(leaf)), np.asarray(
            jax.random.key_data(leaf)
        ).tobytes()
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return type(leaf), leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()
    return type(leaf), repr(leaf)


@pytest.mark.parametrize("max_size", [None, 40, 1], ids=str)
def test_every_kind_of_leaf(tmp_path, max_size):
    tree = leaves()
    eqquant.save(tmp_path, tree, max_shard_size=max_size)
    loaded = eqquant.load(tmp_path, tree)
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    assert jax.tree.map(raw, loaded) == jax.tree.map(raw, tree)
    is_split = len(list(tmp_path.glob("*.safetensors"))) > 3
    assert is_split == (max_size is not None)
    found = eqquant.load(tmp_path)
    # Without x64, 64-bit arrays stay in NumPy, because JAX would truncate them.
    assert found["np f8"].dtype == np.float64 and isinstance(found["np f8"], np.ndarray)
    assert isinstance(found["bool"], jax.Array)
    assert "function" not in found and found["numbers"]["7"] == "é\n"


REJECTED = {
    "object": ({"a": object()}, TypeError, "at a: object"),
    "strings": ({"a": np.array(["x"])}, TypeError, "at a: .*<U1"),
    "int4": ({"a": jnp.zeros(2, "int4")}, TypeError, "at a: .*int4"),
    "complex128": ({"a": np.zeros(2, "c16")}, TypeError, "at a: .*complex128"),
    "traced": (None, TypeError, "at a: .*jit"),
    "described": (
        {"a": jax.ShapeDtypeStruct((2,), "f4")},
        TypeError,
        "ShapeDtypeStruct",
    ),
    "duplicate": ({"a.b": 1, "a": {"b": 2}}, ValueError, "'a.b'"),
    "reserved": ({"__metadata__": jnp.ones(1)}, ValueError, "__metadata__"),
    "surrogate": ({"\ud800": 1}, ValueError, r"\\ud800"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_leaves_that_cannot_be_loaded_are_rejected(path, name):
    tree, error, message = REJECTED[name]
    with pytest.raises(error, match=message):
        if tree is None:
            jax.jit(lambda x: eqquant.save(path, {"a": x}))(jnp.ones(3))
        eqquant.save(path, tree)
    assert not list(path.parent.iterdir())


def test_invalid_arrays_are_rejected(path, normal):
    q = eqquant.quantize(normal(4, 64), "int8")
    with pytest.raises(ValueError, match="at q: codes .*-128"):
        eqquant.save(path, {"q": q.replace(codes=q.codes.at[0, 0].set(-128))})
    with pytest.raises(ValueError, match="scales .*64.*got 2"):
        eqquant.save(path, q.replace(scales=jnp.ones((4, 2))))


@dataclasses.dataclass(frozen=True, repr=False)
class Halves(eqquant.Int8):
    """A user's own format."""

    shift: float = 0.5
    name = "halves"


class Unnamed(eqquant.Int8):
    pass


@dataclasses.dataclass(frozen=True, repr=False)
class Hidden(eqquant.Int8):
    name = "hidden"
    secret: object = None


def test_a_format_of_the_user(path, normal):
    q = eqquant.quantize(normal(4, 64), Halves(shift=0.1))
    eqquant.save(path, q)
    assert_identical(eqquant.load(path, formats=[Halves]), q)
    with pytest.raises(ValueError, match="'halves'.*formats="):
        eqquant.load(path)
    with pytest.raises(ValueError, match="formats: .*'int8'"):
        eqquant.load(path, formats=[Unnamed])
    with pytest.raises(TypeError, match="formats"):
        eqquant.load(path, formats=["nf4"])
    with pytest.raises(ValueError, match="'int8'.*`name`"):
        eqquant.save(path, eqquant.quantize(normal(4, 64), Unnamed()))
    with pytest.raises(ValueError, match="<class 'object'>"):
        eqquant.save(path, eqquant.quantize(normal(4, 64), Hidden(secret=object)))


def test_like_must_fit(path, model):
    eqquant.save(path, eqquant.quantize_tree(model, "nf4"))

    def rejects(message, like):
        with pytest.raises(ValueError, match=message):
            eqquant.load(path, like)

    bias = lambda m: m[2].bias
    rejects(
        "NF4.* at layers.0.weight, but like has .*Int8",
        eqquant.quantize_tree(model, "int8"),
    )
    rejects("extra", {"extra": jnp.ones(1)})
    rejects("like .*layers.2.bias", eqx.tree_at(bias, model, None))
    half = eqx.tree_at(bias, model, model[2].bias.astype("float16"))
    rejects(r"float32\[33\] at layers.2.bias, but like has an array float16", half)
    rejects("at layers.2.bias", eqx.tree_at(bias, model, jnp.ones(32)))
    rejects("at layers.3.p, but like has 1", eqx.tree_at(lambda m: m[3].p, model, 1))


def test_shards_replace_each_other(tmp_path):
    """After each save, only the files of the current checkpoint remain."""
    for step, max_size in enumerate([None, 100, 200, None, 100]):
        tree = {f"w{i}": jnp.full(20, step, "float32") for i in range(6)}
        eqquant.save(tmp_path / "m.safetensors", tree, max_shard_size=max_size)
        count = 1 if max_size is None else 6 * 100 // max_size + 1
        assert len(list(tmp_path.iterdir())) == count
        for place in (tmp_path, tmp_path / "m.safetensors"):
            assert_identical(eqquant.load(place), tree)
    (shard, *_) = tmp_path.glob("*-00001-of-*")
    with pytest.raises(ValueError, match="shard 1 of 6"):
        eqquant.load(shard)


def test_the_library_safetensors_reads_and_writes_the_same_files(path, normal):
    tree = {"a": {"w": normal(3, 5)}, "b": normal(7).astype(jnp.bfloat16)}
    eqquant.save(path, tree, metadata={"format": "pt"})
    assert eqquant.checkpoints.load_metadata(path) == {"format": "pt"}
    with safe_open(path, "np") as file:
        assert file.metadata()["format"] == "pt"
        assert np.array_equal(file.get_tensor("a.w"), tree["a"]["w"])
    save_file({"a.w": np.arange(6.0), "a": np.arange(3), "x": np.ones((), "f4")}, path)
    loaded = eqquant.load(path)
    assert loaded.keys() == {"a", "a.w", "x"}
    assert np.array_equal(loaded["a.w"], np.arange(6.0))
    like = {"a.w": np.zeros(6), "a": np.zeros(3, int), "x": jnp.ones(())}
    assert_identical(eqquant.load(path, like), load_file(path))


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="max_shard_size.*got 0"):
        eqquant.save(tmp_path, {}, max_shard_size=0)
    with pytest.raises(ValueError, match="path .*safetensors.*model.npz"):
        eqquant.save(tmp_path / "model.npz", {})
    with pytest.raises(ValueError, match="metadata.*'eqquant'"):
        eqquant.save(tmp_path, {}, metadata={"eqquant": ""})
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        eqquant.load(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors.*none"):
        eqquant.load(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="a.safetensors: .* 0 bytes"):
        eqquant.load(tmp_path)


def test_arrays_return_to_their_mesh(path, normal):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.P("x"))
    q = jax.device_put(eqquant.quantize(normal(16, 64), "nf4"), split)
    tree = {"q": q, "b": jax.device_put(normal(8), split), "c": normal(3)}
    eqquant.save(
        path, eqquant.shard_tree(tree, mesh, {"q": jax.P("x"), "b": None, "c": None})
    )
    described = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )
    planned = eqquant.shard_tree(
        tree, mesh, {"q": jax.P("x"), "b": jax.P("x"), "c": None}
    )
    for like in (tree, described, planned):
        loaded = eqquant.load(path, like)
        assert_identical(loaded, like if like is planned else tree)
        assert loaded["q"].codes.sharding.is_equivalent_to(split, 2)
        assert loaded["b"].sharding == split


def test_shared_layers(path):
    key = jax.random.key(0)
    pair = eqx.nn.Linear(64, 64, key=key), eqx.nn.Embedding(64, 64, key=key)
    tied = eqx.nn.Shared(pair, where=lambda x: x[1].weight, get=lambda x: x[0].weight)
    eqquant.save(path, tied)
    assert eqx.tree_equal(eqquant.load(path, tied), tied)


def test_quantize_checkpoint_keeps_numbers(path, normal):
    tree = {"weight": normal(16, 64), "step": 3}
    eqquant.save(path, tree)
    eqquant.checkpoints.quantize_checkpoint(
        path, path.parent / "int8", "int8", progress=False
    )
    found = eqquant.load(path.parent / "int8")
    assert found["step"] == 3
    assert_identical(found["weight"], eqquant.quantize(tree["weight"], "int8"))


def test_a_tree_with_a_single_leaf(path):
    eqquant.save(path, jnp.arange(3))
    assert_identical(eqquant.load(path), jnp.arange(3))
    eqquant.save(path, {})
    assert eqquant.load(path) == {} and eqquant.load(path, {}) == {}
    assert json.loads(path.read_bytes()[8:]).keys() == {"__metadata__"}
