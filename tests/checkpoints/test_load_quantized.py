"""Quantizing while loading equals quantizing after loading, bit for bit."""

import json
import re

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from eqquant.checkpoints import _pieces
from helpers import assert_identical, pairs
from safetensors.numpy import save_file


class Stack(eqx.Module):
    """Two axes of stacked layers under a scan, and an embedding."""

    table: eqx.nn.Embedding
    layers: eqx.nn.Linear
    norm: jax.Array
    steps: int
    activation: object = jax.nn.relu


@pytest.fixture
def model():
    keys = jax.random.split(jax.random.key(0), 6).reshape(2, 3)
    make = lambda key: eqx.nn.Linear(64, 32, key=key)
    table = eqx.nn.Embedding(20, 64, key=keys[0, 0])
    layers = eqx.filter_vmap(eqx.filter_vmap(make))(keys)
    return Stack(table, layers, jnp.arange(3.0), 5)


def names(path):
    """Return the tensor names of a PyTorch checkpoint."""
    if path.startswith("layers."):
        name = path.removeprefix("layers.")
        return [[f"h.{i}.{j}.{name}" for j in range(3)] for i in range(2)]
    return f"model.{path}"


@pytest.fixture
def tensors(model):
    found = {
        f"h.{i}.{j}.{name}": np.asarray(getattr(model.layers, name)[i, j])
        for i in range(2)
        for j in range(3)
        for name in ("weight", "bias")
    }
    found["model.table.weight"] = np.asarray(model.table.weight)
    return found | {"model.norm": np.asarray(model.norm)}


@pytest.fixture
def folder(tmp_path, tensors):
    """Write two shards in the layout of Hugging Face."""
    weight_map = {}
    for i, part in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


OPTIONS = {
    "nf4": {"format": "nf4"},
    "double": {"format": eqquant.NF4(double_quantization=True)},
    "rules": {"rules": {"table.*": None, "layers.weight": ("int8", -2)}},
    "where": {"where": lambda leaf: getattr(leaf, "ndim", 0) == 4, "format": "ternary"},
    "across stacked axes": {"rules": {"layers.weight": ("int8", (0, 3))}},
    "rows and columns": {"rules": {"layers.weight": ("int8", (-2, -1))}},
    "nothing": {"format": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_quantizing_after_loading(folder, model, options):
    expected = eqquant.quantize_tree(model, **options)
    for like in (model, eqx.filter_eval_shape(lambda: model)):
        loaded = eqquant.load_quantized(folder, like, names=names, **options)
        assert eqx.tree_equal(loaded, expected)
    index = folder / "model.safetensors.index.json"
    loaded = eqquant.load_quantized(index, model, names=names, **options)
    assert eqx.tree_equal(loaded, expected)


@pairs("shape, axis", [(37, 64), (1, 5, 7, 64), (64,)], [-1, 0, (-2, -1)])
def test_pieces_equal_the_whole(normal, monkeypatch, shape, axis):
    if isinstance(axis, tuple) and len(shape) == 1:
        return
    monkeypatch.setattr(_pieces, "_piece", 500)
    array = np.asarray(normal(*shape, dtype=jnp.bfloat16))
    for format in (eqquant.Int8(), eqquant.NF4(double_quantization=True)):
        made = _pieces.quantize_in_pieces(array, format, axis, check_finite=True)
        assert_identical(made, eqquant.quantize(array, format, axis=axis))


def test_convolutions(tmp_path):
    model = eqx.nn.Conv2d(4, 16, 3, key=jax.random.key(0))
    eqquant.save(tmp_path, model)
    loaded = eqquant.load_quantized(tmp_path, model, "int8")
    expected = eqquant.quantize_tree(model, "int8")
    assert eqx.tree_equal(loaded, expected) and type(loaded) is type(expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_floats_are_converted(tmp_path, normal, dtype):
    """Convert in several pieces."""
    w = np.asarray(normal(300, 8000)).astype(dtype)
    eqquant.save(tmp_path, {"w": w, "n": np.arange(3)})
    like = {"w": jax.ShapeDtypeStruct(w.shape, jnp.float32), "n": jnp.zeros(3, "int32")}
    loaded = eqquant.load_quantized(tmp_path, like, rules={"w": ("int8", -1)})
    assert_identical(loaded["w"], eqquant.quantize(w.astype(np.float32), "int8"))
    assert_identical(loaded["n"], jnp.arange(3, dtype="int32"))
    plain = eqquant.load_quantized(tmp_path, like, None)
    assert_identical(plain["w"], jnp.asarray(w.astype(np.float32)))


def test_values_out_of_range_of_a_dtype(tmp_path):
    tree = {"w": np.array([1e6, 1.0], ml_dtypes.bfloat16), "n": np.array([2**40])}
    eqquant.save(tmp_path, tree)
    like = {"w": jnp.ones(2, "float16"), "n": np.array([1])}
    with pytest.raises(ValueError, match="at w: .*'w' .*float16"):
        eqquant.load_quantized(tmp_path, like, None)
    like = {"w": jnp.ones(2), "n": jnp.ones(1, "int32")}
    with pytest.raises(ValueError, match="'n' .*int32"):
        eqquant.load_quantized(tmp_path, like, None)
    with pytest.raises(ValueError, match="'n' .*int64.*float32"):
        eqquant.load_quantized(tmp_path, {"w": jnp.ones(2), "n": jnp.ones(1)}, None)
    wide = {"w": jnp.ones(2), "n": jax.ShapeDtypeStruct((1,), np.int64)}
    with pytest.raises(ValueError, match="int64.*jax_enable_x64"):
        eqquant.load_quantized(tmp_path, wide, None)


def test_invalid_names(folder, model, tensors):
    def rejects(error, message, like=model, names=names, **options):
        with pytest.raises(error, match=message):
            eqquant.load_quantized(folder, like, names=names, **options)

    rejects(
        ValueError,
        "at table.weight: .*'table.weight'.*'h.0.0.weight'",
        names=None,
    )
    replaced = lambda new: lambda p: new if p == "norm" else names(p)
    rejects(ValueError, "at norm: .*'x'", names=replaced("x"))
    rejects(
        ValueError,
        r"at norm: .*\(3,\).*'h.0.0.bias' .*\(32,\)",
        names=replaced("h.0.0.bias"),
    )
    rejects(
        ValueError,
        r"at norm: .*\(1,\)",
        names=replaced(["model.norm"]),
    )
    rejects(TypeError, r"names .*\['a', 'b'\]", names=replaced([["a"], ["a", "b"]]))
    rejects(TypeError, "names .*got 3", names=replaced(3))
    rejects(TypeError, r"names .*got \[\]", names=replaced([]))
    rejects(ValueError, "'model.norm'.*ignore", names=replaced(None))
    rejects(
        ValueError,
        "at norm: .*ShapeDtypeStruct",
        like=eqx.filter_eval_shape(lambda: model),
        names=replaced(None),
    )
    rejects(ValueError, "at table.weight: like", eqquant.quantize_tree(model))
    for ignore in ("model.*", ["x", re.compile(r"model\.no..")]):
        options = {"names": replaced(None), "ignore": ignore}
        loaded = eqquant.load_quantized(folder, model, None, **options)
        assert eqx.tree_equal(loaded, model)


def test_warnings_and_non_finite_values(tmp_path, normal):
    eqquant.save(tmp_path, {"w": normal(8, 64).at[1, 2].set(jnp.nan)})
    like = {"w": jnp.zeros((8, 64))}
    with pytest.warns(UserWarning, match="load_quantized: "):
        eqquant.load_quantized(tmp_path, like)
    with pytest.raises(ValueError, match="load_quantized: at w: .*NaN"):
        eqquant.load_quantized(tmp_path, like, rules={"w": "nf4"})
    rule = {"w": "nf4"}
    eqquant.load_quantized(tmp_path, like, rules=rule, check_finite=False)


def test_quantized_weights_keep_their_format(folder, model, tmp_path):
    """Stack weights that `quantize_checkpoint` wrote under PyTorch names."""
    eqquant.checkpoints.quantize_checkpoint(folder, tmp_path / "small", "int8")
    found = eqquant.load(tmp_path / "small")
    assert found["model"]["table"]["weight"].format == eqquant.Int8()
    assert isinstance(found["model"]["norm"], jax.Array)
    loaded = eqquant.load_quantized(tmp_path / "small", model, "nf4", names=names)
    assert eqx.tree_equal(loaded, eqquant.quantize_tree(model, "int8"))
    mixed = {"h.1.*": "nf4"}
    eqquant.checkpoints.quantize_checkpoint(
        folder, tmp_path / "mixed", "int8", rules=mixed
    )
    with pytest.raises(ValueError, match="'h.1.0.weight'.*'h.0.0.weight'"):
        eqquant.load_quantized(tmp_path / "mixed", model, names=names)


def test_quantize_checkpoint(folder, tmp_path, tensors):
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(b"x")
    (folder / "code.py").write_text("")
    dst = tmp_path / "out"
    rules = {"h.0.*": None, "h.1.0.weight": ("int8", 0), "model.norm": "int8"}
    eqquant.checkpoints.quantize_checkpoint(folder, dst, rules=rules)
    assert {file.name for file in dst.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.model",
    }
    loaded = eqquant.load(dst)
    assert_identical(
        loaded["h"]["0"]["0"]["weight"], jnp.asarray(tensors["h.0.0.weight"])
    )
    for name, format, axis in (
        ("h.1.0.weight", "int8", 0),
        ("h.1.1.weight", "nf4", -1),
        ("model.norm", "int8", -1),
        ("model.table.weight", "nf4", -1),
    ):
        found = loaded
        for key in name.split("."):
            found = found[key]
        assert_identical(found, eqquant.quantize(tensors[name], format, axis=axis))
    with pytest.raises(ValueError, match="quantize_checkpoint: .*weight"):
        eqquant.checkpoints.quantize_checkpoint(dst, tmp_path / "again")
    with pytest.raises(ValueError, match="src and dst"):
        eqquant.checkpoints.quantize_checkpoint(folder, folder)
