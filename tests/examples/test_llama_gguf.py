"""Models of examples/llama in GGUF files: architecture, weights, tokenizer."""

import dataclasses
import pathlib
import sys

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_models import DATA, metadata_of, tensors_of, write_gguf
from helpers import assert_identical, slow, strict
from safetensors.numpy import load_file


EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "llama"
sys.path.insert(0, str(EXAMPLE))

import load  # noqa: E402
from config import DividedFrequencies  # noqa: E402
from folder import Folder  # noqa: E402
from joined import join, Joined  # noqa: E402
from load import load_model, open_model  # noqa: E402
from mixed import Mixed  # noqa: E402
from model import empty_cache, unstack  # noqa: E402


NAMES = sorted(path.name for path in DATA.iterdir())
FAST = ("gemma3", "llama3", "llama_linear", "qwen3_moe")


def made(name, folder, **changes):
    metadata = {**metadata_of(name), **changes}
    metadata = {k: v for k, v in metadata.items() if v is not None}
    return write_gguf(folder / "model.gguf", metadata, tensors_of(name))


@pytest.mark.parametrize("name", [n if n in FAST else slow(n) for n in NAMES])
def test_logits_equal_transformers(name, tmp_path):
    source, folder = open_model(made(name, tmp_path)), Folder(DATA / name)
    # The scale of attention in Gemma is not in the file.
    source.config = dataclasses.replace(
        source.config, attention_scale=folder.config.attention_scale
    )
    assert source.kind == folder.kind or (source.kind, name) == ("llama", "mistral")
    assert source.context_length == folder.context_length
    reference = load_file(DATA / name / "reference.safetensors")
    forward = eqx.filter_jit(strict(lambda model, tokens: model(tokens)))
    got = forward(load_model(source, stacked=True, progress=False), reference["tokens"])
    np.testing.assert_allclose(got, reference["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama_linear", slow("mixtral")])
def test_weights_equal_those_of_the_folder(name, tmp_path):
    source = open_model(made(name, tmp_path))
    source.config = Folder(DATA / name).config  # The file rounds numbers to float32.
    arrays = lambda m: eqx.filter(m, eqx.is_array)
    for stacked in (False, True):
        got = load_model(source, "nf4", stacked=stacked, progress=False)
        expected = load_model(DATA / name, "nf4", stacked=stacked, progress=False)
        assert_identical(arrays(got), arrays(expected))


@pytest.mark.parametrize("name", ["llama_linear", slow("gemma3"), slow("qwen2")])
def test_layers_of_different_formats(name, tmp_path):
    """Weights in several formats have a stack for each. Results and weights are those
    of separate layers."""
    int8 = eqquant.Int8(block_size=32, scale_dtype="float16")
    int4 = eqquant.Int4(block_size=32, scale_dtype="float16")
    formats = {"blk.0.attn_q": int4, "blk.1.attn_q": int8, "blk.1.attn_v": int8}
    arrays = {
        key: eqquant.quantize(jnp.asarray(array), formats[key.removesuffix(".weight")])
        if key.removesuffix(".weight") in formats
        else array
        for key, array in tensors_of(name).items()
    }
    path = tmp_path / "mixed.gguf"
    eqquant.checkpoints.write_gguf(path, arrays, metadata=metadata_of(name))
    mixed = load_model(path, progress=False)
    apart = load_model(path, stacked=False, progress=False)
    attention = mixed.layers.attention
    assert [isinstance(x, Mixed) for x in (attention.query, attention.value)] == [1, 1]
    assert isinstance(attention.key, eqx.nn.Linear)
    found = [stack.weight.format for stack in attention.query.stacks]
    assert found == [int4, int8] and attention.query.kinds == (0, 1)
    leaves = lambda m: eqx.filter(m, eqx.is_array)
    assert_identical(leaves(unstack(mixed)), leaves(apart))

    @eqx.filter_jit
    @strict
    def run(model, tokens, cache):
        first, cache = model.extend(tokens[:, :-1], cache, 0)
        last, _ = model.extend(tokens[:, -1:], cache, tokens.shape[1] - 1)
        return model(tokens)[:, -1], model.logits(last)[:, 0], model.logits(first)

    # Otherwise, the number of rows chooses kernels with different rounding (AMX).
    exact = lambda model: eqquant.with_compute(model, precision="highest")
    mixed, apart = exact(mixed), exact(apart)
    tokens = jnp.arange(8)[None]
    caches = [empty_cache(model, 1, 8) for model in (mixed, apart)]
    got, expected = run(mixed, tokens, caches[0]), run(apart, tokens, caches[1])
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)  # Float32 sums in another order.
    np.testing.assert_allclose(*got[:2], atol=1e-4)


# Rows of queries and keys have another order in files of Llama. Values of the second
# case have another format, and those of the third are not quantized.
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(
    "name, formats",
    [
        ("llama_linear", dict.fromkeys("qkv", "int8")),
        ("qwen2", {"q": "int8", "k": "int8", "v": "int4"}),
        ("llama_linear", {"q": "int4", "k": "int4"}),
    ],
)
def test_loading_joins_layers_like_join(name, formats, stacked, tmp_path):
    makers = {"int8": eqquant.Int8, "int4": eqquant.Int4}
    options = {"block_size": 32, "scale_dtype": "float16"}
    arrays = {}
    for key, array in tensors_of(name).items():
        which = formats.get(key.removesuffix(".weight").rsplit("attn_", 1)[-1])
        if which and key.endswith(".weight"):
            array = eqquant.quantize(jnp.asarray(array), makers[which](**options))
        arrays[key] = array
    path = tmp_path / "model.gguf"
    eqquant.checkpoints.write_gguf(path, arrays, metadata=metadata_of(name))
    read = lambda **options: load_model(
        path, stacked=stacked, progress=False, **options
    )
    joined, expected = read(joined=True), join(read())
    layer = joined.layers if stacked else joined.layers[1]
    same = len({*formats.values()}) == 1
    assert len(layer.attention.query.sizes) == (3 if same and "v" in formats else 2)
    assert_identical(joined, expected)
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    abstract = read(joined=True, abstract=True)
    assert jax.tree.structure(abstract) == jax.tree.structure(joined)
    assert shapes(abstract) == shapes(joined)


@pytest.mark.parametrize("format", ["nf4", None])
@pytest.mark.parametrize("is_described", [True, False])
def test_folders_are_joined_like_join(monkeypatch, format, is_described):
    folder = DATA / "qwen2"
    if not is_described:  # As for weights of libraries without formats in the header.
        monkeypatch.setattr(load, "_described", lambda *_: None)
    joined = load_model(folder, format, joined=True, progress=False)
    expected = join(load_model(folder, format, progress=False))
    assert_identical(joined, expected)
    assert isinstance(joined.layers.mlp.gate, Joined) == (format is not None)


def test_frequencies_of_llama_3(tmp_path):
    source = open_model(made("llama3", tmp_path))
    assert isinstance(source.config.rope_scaling, DividedFrequencies)
    factors = source.config.rope_scaling.factors
    assert max(factors) == 4 and len(factors) == 8
    with pytest.raises(ValueError, match="rope_freqs.weight and rope.scaling"):
        changes = {"llama.rope.scaling.type": "linear"}
        open_model(
            made("llama3", tmp_path, **changes, **{"llama.rope.scaling.factor": 2.0})
        )


UNSUPPORTED = {
    "architecture": ({"general.architecture": "mamba"}, "architecture='mamba'"),
    "no architecture": ({"general.architecture": None}, "architecture is missing"),
    "missing": ({"llama.block_count": None}, "llama.block_count is missing"),
    "a text": ({"llama.block_count": "2"}, "llama.block_count must be an integer"),
    "zero": ({"llama.attention.head_count": 0}, "llama.attention.head_count must be"),
    "layers differ": (
        {"llama.attention.head_count_kv": [1, 2]},
        "llama.attention.head_count_kv must be",
    ),
    "partial rotation": ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
    "values of another size": ({"llama.attention.value_length": 8}, "value_length"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type must be 'none'"),
    "unknown": ({"llama.logit_scale": 2.0}, "llama.logit_scale is not supported"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
    "tokens": ({"tokenizer.ggml.tokens": [1, 2]}, "tokens must be an array of strings"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_metadata_raises_and_is_named(case, tmp_path):
    changes, message = UNSUPPORTED[case]
    with pytest.raises(ValueError, match=f"model.gguf: .*{message}"):
        open_model(made("llama2", tmp_path, **changes))


def test_missing_and_additional_tensors(tmp_path):
    tensors = tensors_of("llama2")
    weight = tensors.pop("blk.1.ffn_up.weight")
    path = write_gguf(tmp_path / "a.gguf", metadata_of("llama2"), tensors)
    with pytest.raises(ValueError, match="blk.1.ffn_up.weight"):
        load_model(path, progress=False)
    tensors |= {"blk.1.ffn_up.weight": weight, "blk.1.extra.weight": weight}
    path = write_gguf(tmp_path / "b.gguf", metadata_of("llama2"), tensors)
    with pytest.raises(ValueError, match="blk.1.extra.weight"):
        load_model(path, progress=False)


def test_other_files(tmp_path):
    path = DATA / "llama3" / "model.safetensors"
    with pytest.raises(ValueError, match="neither a GGUF file nor the folder"):
        open_model(path)
