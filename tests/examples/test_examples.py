"""The sentence encoder of `examples/minilm.py`: real weights, unchanged model code."""

import importlib.util
import pathlib
import sys

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import kernels_in, needs_compiler
from safetensors.numpy import load_file


EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def minilm():
    spec = importlib.util.spec_from_file_location("minilm", EXAMPLES / "minilm.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["minilm"] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(minilm):
    return minilm.load_model()


@pytest.fixture(scope="module")
def batch(minilm):
    return minilm.tokenize(minilm.read_sentences()[:16])


def test_float_model_is_correct(minilm, model, batch):
    path = EXAMPLES / "data" / "minilm_reference.safetensors"
    reference = load_file(path)["embeddings"][:16]
    assert minilm.cosines(minilm.embed(model, *batch), reference).min() > 0.9999


# The table of `examples/minilm.py` has 0.9990 and 0.9495 for all sentences.
@pytest.mark.parametrize("format,least", [("int8", 0.999), ("nf4", 0.94)])
@pytest.mark.slow
def test_quantized_models_are_close(minilm, model, batch, format, least):
    quantized = eqquant.quantize_tree(model, format)
    assert type(quantized) is type(model)
    expected = minilm.embed(model, *batch)
    assert minilm.cosines(minilm.embed(quantized, *batch), expected).min() > least
    # Equal to the dequantized model, up to rounding.
    dense = minilm.embed(eqquant.dequantize_tree(quantized), *batch)
    assert minilm.cosines(minilm.embed(quantized, *batch), dense).min() > 1 - 1e-5


@needs_compiler
@pytest.mark.slow
def test_encoder_uses_kernels_on_tpu(minilm):
    model = eqx.filter_eval_shape(
        lambda key: eqquant.quantize_tree(minilm.SentenceEncoder(key=key), "nf4"),
        jax.random.key(0),
    )
    # Of the six layers, one for the products, and two for the gradient between them.
    with_layers = lambda n: eqx.tree_at(lambda m: m.layers, model, model.layers[:n])
    tokens = jax.ShapeDtypeStruct((4, 32), jnp.int32)
    mask = jax.ShapeDtypeStruct((4, 32), bool)

    def forward(model, tokens, mask):
        return jax.vmap(model)(tokens, mask)

    compiled = eqquant.debug.compile_for_tpu(
        forward, with_layers(1), tokens, mask, chip="v6e"
    )
    assert kernels_in(compiled) == ["nf4_columns"] * 6

    def loss(offsets, model, tokens, mask):
        layers = model.layers

        def add(layer, offset):
            attention = eqx.tree_at(
                lambda a: a.output_proj.bias, layer.attention, replace_fn=offset.__add__
            )
            return eqx.tree_at(lambda l: l.attention, layer, attention)

        layers = type(layers)(map(add, layers, offsets))
        shifted = eqx.tree_at(lambda m: m.layers, model, layers)
        return jnp.sum(forward(shifted, tokens, mask) ** 2)

    # Like adapters: a gradient through the frozen weights of each layer.
    offsets = [jax.ShapeDtypeStruct((384,), jnp.float32)] * 2
    compiled = eqquant.debug.compile_for_tpu(
        jax.grad(loss), offsets, with_layers(2), tokens, mask, chip="v6e"
    )
    linear = 2 * 6  # Layers times matrices per layer.
    found = kernels_in(compiled)
    assert found.count("nf4_columns") >= linear
    # All except the projections before the first offset.
    assert found.count("nf4_rows") == linear - 4
