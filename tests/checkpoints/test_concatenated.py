"""Tensors that are rows of one array."""

import pathlib

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from eqquant.checkpoints import Concatenated
from helpers import assert_identical


GGUF = pathlib.Path(__file__).parent / "foreign" / "data" / "gguf.gguf"
ROWS = {"q": 32, "k": 16, "v": 24}


@pytest.fixture
def apart(normal):
    """Weights and biases of two layers."""
    weights = {name: normal(2, rows, 64) for name, rows in ROWS.items()}
    biases = {f"{name}_bias": normal(2, rows) for name, rows in ROWS.items()}
    return weights | biases


@pytest.fixture
def whole(apart):
    weight = jnp.concatenate([apart[name] for name in ROWS], 1)
    bias = jnp.concatenate([apart[f"{name}_bias"] for name in ROWS], 1)
    layer = eqx.nn.Linear(64, weight.shape[1], key=jax.random.key(0))
    return eqx.tree_at(lambda x: (x.weight, x.bias), layer, (weight, bias))


def names(path):
    end = "_bias" if path == "bias" else ""
    return [Concatenated(*(f"{i}.{name}{end}" for name in ROWS)) for i in range(2)]


def save_layers(path, leaves):
    layers = [{name: leaf[i] for name, leaf in leaves.items()} for i in range(2)]
    eqquant.save(path, layers)
    return path


FORMATS = {
    "nf4": "nf4",
    "double": eqquant.NF4(double_quantization=True),
    "one scale for all": "nvfp4",
    "across rows": ("int8", -2),
    "nothing": None,
}


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_equals_quantizing_the_whole(tmp_path, apart, whole, format):
    path = save_layers(tmp_path / "model.safetensors", apart)
    rules = {"weight": format}
    loaded = eqquant.load_quantized(path, whole, None, rules=rules, names=names)
    expected = eqquant.quantize_tree(whole, None, rules=rules)
    assert_identical(loaded, expected)
    abstract = eqquant.load_quantized(
        path, whole, None, rules=rules, names=names, abstract=True
    )
    assert jax.tree.structure(abstract) == jax.tree.structure(loaded)
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    assert shapes(abstract) == shapes(loaded)


@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_quantized_tensors_keep_their_format(tmp_path, apart, whole, format):
    quantized = {
        name: leaf if name.endswith("bias") else eqquant.quantize(leaf, format)
        for name, leaf in apart.items()
    }
    path = save_layers(tmp_path / "model.safetensors", quantized)
    loaded = eqquant.load_quantized(path, whole, None, names=names)
    assert_identical(loaded, eqquant.quantize_tree(whole, rules={"weight": format}))


def test_rows_that_share_scales(tmp_path, apart, whole):
    quantized = {
        name: leaf if name.endswith("bias") else eqquant.quantize(leaf, "int8", axis=-2)
        for name, leaf in apart.items()
    }
    path = save_layers(tmp_path / "model.safetensors", quantized)
    for abstract in (False, True):
        with pytest.raises(ValueError, match="at weight: '0.q' cannot be concatenated"):
            eqquant.load_quantized(path, whole, None, names=names, abstract=abstract)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "TQ2_0", "F16"])
def test_gguf(name):
    one = eqquant.checkpoints.read_checkpoint(GGUF)[name]
    like = [jax.ShapeDtypeStruct((3 * one.shape[0], one.shape[1]), one.dtype)]
    (loaded,) = eqquant.load_quantized(
        GGUF, like, None, names=lambda path: Concatenated(name, name, name), ignore="*"
    )
    concatenate = eqquant.quaxify(lambda *parts: jnp.concatenate(parts))
    assert_identical(loaded, concatenate(one, one, one))


def test_bad_names(tmp_path, apart, whole):
    path = save_layers(tmp_path / "model.safetensors", apart)

    def rejects(error, message, weight):
        give = lambda path: weight if path == "weight" else names(path)
        with pytest.raises(error, match=message):
            eqquant.load_quantized(path, whole, names=give)

    short = [Concatenated("0.q", "0.k")] * 2
    rejects(ValueError, r"at weight: .*\(2, 72, 64\), but '0.q' and '0.k' .*48", short)
    bias = [Concatenated("0.q", "0.q_bias")] * 2
    rejects(ValueError, r"at weight: .*\(32, 64\), \(32,\).* cannot", bias)
    rejects(ValueError, "at weight: .*no tensor '0.x'", [Concatenated("0.x")] * 2)
    mixed = [Concatenated("0.q", "0.k", "0.v"), "1.q"]
    rejects(TypeError, "at weight: names must return .*Concatenated", mixed)
    with pytest.raises(ValueError, match="Concatenated: .*at least one name"):
        Concatenated()
    with pytest.raises(TypeError, match="names.*3"):
        Concatenated("a", 3)  # pyright: ignore[reportArgumentType]
