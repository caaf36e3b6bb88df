"""The model of examples/llama is correct, with and without quantization."""

import dataclasses
import pathlib
import sys

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, relative, slow, strict
from safetensors.numpy import load_file


HERE = pathlib.Path(__file__).parent
DATA = HERE / "data" / "llama"
EXAMPLE = HERE.parents[1] / "examples" / "llama"
sys.path.insert(0, str(EXAMPLE))

from attention import attend, attend_in_pieces  # noqa: E402
from attention_kernel import attend_by_kernel  # noqa: E402
from folder import write_model  # noqa: E402
from generate import quantize_cache  # noqa: E402
from load import load_model  # noqa: E402
from lora import add_adapters  # noqa: E402
from model import Decoder, empty_cache  # noqa: E402
from packing import losses, Rows  # noqa: E402


NAMES = sorted(path.name for path in DATA.iterdir())
# Together they cover the features of all others.
SEVERAL = ["gemma2", "llama3", "llama_linear", "mixtral", "qwen3_moe"]


def some(*fast):
    """Mark the other architectures as slow: they share code paths."""
    return [name if name in fast else slow(name) for name in SEVERAL]


def reference(name):
    values = load_file(DATA / name / "reference.safetensors")
    return jnp.asarray(values["tokens"]), values["logits"]


def load(name, format=None, **options):
    return load_model(DATA / name, format, progress=False, **options)


# Nothing is decoded in full, here and below.
forward = eqx.filter_jit(strict(lambda model, tokens: model(tokens)))


@eqx.filter_jit
@strict
def extend(model, tokens, cache, start):
    hidden, cache = model.extend(tokens, cache, start)
    return model.logits(hidden), cache


def in_pieces(model, tokens, cache, *sizes):
    start, out = 0, []
    for size in sizes:
        piece = tokens[:, start : start + size]
        logits, cache = extend(model, piece, cache, jnp.asarray(start))
        out.append(logits)
        start += size
    assert start == tokens.shape[1]
    return jnp.concatenate(out, 1), cache


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name):
    tokens, expected = reference(name)
    got = forward(load(name, stacked=True), tokens)
    # Both compute in float32: the measured difference is at most 1e-5.
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "name, stacked",
    [("qwen3_moe", False)]
    + [
        pytest.param(name, stacked, marks=pytest.mark.slow)
        for name, stacked in (("gemma2", True), ("llama3", False), ("mixtral", True))
    ],
)
def test_quantized_model_in_pieces_equals_dequantized_model(name, stacked):
    tokens, _ = reference(name)
    model = load(name, "nf4", stacked=stacked)
    model = eqquant.with_compute(model, precision="highest")
    assert eqquant.is_quantized(model.embedding.weight)
    layer = model.layers if stacked else model.layers[1]
    mlp = layer.mlp.mlp if model.config.experts else layer.mlp
    for linear in (layer.attention.query, layer.attention.output, mlp.up, mlp.down):
        assert eqquant.is_quantized(linear.weight)
    expected = forward(eqquant.dequantize_tree(model), tokens)
    got, _ = in_pieces(model, tokens, empty_cache(model, 2, 24), 10, 1, 10)
    # Float32 rounding through several layers. The error of NF4 itself is 0.1.
    assert_close(got, expected, 1e-4)


@pytest.mark.parametrize("name", some("llama3"))
def test_a_quantized_cache(name):
    tokens, _ = reference(name)
    model = load(name)
    cache = empty_cache(model, 2, 24)
    expected, _ = in_pieces(model, tokens, cache, 10, 1, 10)
    cache = quantize_cache(cache, "int8")
    got, after = in_pieces(model, tokens, cache, 10, 1, 10)
    assert jax.tree.structure(after) == jax.tree.structure(cache)
    # INT8 with a scale per 16 values has an error of 0.004 in each key and value,
    # which can change the experts that a router selects.
    assert 0 < relative(got, expected) < (0.3 if model.config.experts else 0.03)


@pytest.mark.parametrize("format", [None, "int8"])
def test_queries_of_long_prompts_are_processed_in_groups(format):
    q, k, v = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(2, 4, 256, 8), (4, 8, 300), (4, 300, 8)])
    )
    if format is not None:
        k = eqquant.quantize(k, format, axis=-2)
        v = eqquant.quantize(v, format)
    mask = jnp.arange(300) <= 20 + jnp.arange(256)[:, None]
    run = jax.jit(strict(lambda q, mask: attend(q, k, v, mask[None], 5.0)))
    pieces = [run(q[:, :, i : i + 64], mask[i : i + 64]) for i in range(0, 256, 64)]
    # Products have fewer rows in one case, so rounding may differ.
    assert_close(run(q, mask), jnp.concatenate(pieces, 2), 1e-4)


@pytest.mark.parametrize(
    "capacity, masks", [(256, 2), pytest.param(4096, 1, marks=pytest.mark.slow)]
)
def test_attention_by_a_kernel(capacity, masks):
    """The TPU kernel, interpreted on the CPU, gives the same results."""
    normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
    q = normal(0, 2, 6, 1, 64)
    keys, values = normal(1, 3, 4, 64, capacity), normal(2, 3, 4, capacity, 64)
    run = jax.jit(attend_by_kernel, static_argnums=(5, 7))
    for start in (0, 5, capacity // 2, capacity - 1):
        tokens = jnp.arange(capacity)
        mask = [(tokens <= start) & (tokens >= start - 99 * i) for i in (9999, 1)]
        mask = jnp.stack(mask[:masks])[:, None]
        for cap in (None, 5.0):
            expected = attend(q, keys[1], values[1], mask, cap)
            got = run(q, keys, values, 1, mask, cap, start, True)
            assert relative(got, expected) < 1e-5


def test_a_capacity_that_the_kernel_cannot_read():
    q, keys, values = (
        jnp.ones(s) for s in [(1, 1, 1, 8), (1, 1, 8, 3000), (1, 1, 3000, 8)]
    )
    with pytest.raises(ValueError, match="capacity of 3000 .* multiple of 2048"):
        attend_by_kernel(q, keys, values, 0, jnp.ones((1, 1, 3000), bool), None, 0)


@pytest.mark.parametrize("capacity", [24, 544, slow(1024)])
@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_attention_in_pieces(capacity, dtype):
    """Pieces have 256 tokens or, at the end, 64 or fewer. The cache of a bfloat16 model
    is float32."""
    normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
    q = normal(0, 2, 6, 1, 64).astype(dtype)
    keys, values = normal(1, 3, 4, 64, capacity), normal(2, 3, 4, capacity, 64)
    run = jax.jit(attend_in_pieces, static_argnums=5)
    for start in {0, 5, 23, 63, 64, 255, 256, 511, 543, capacity - 1}:
        if start < capacity:
            mask = (jnp.arange(capacity) <= start)[None, None]
            expected = attend(q, keys[1], values[1], mask, 5.0)
            got = run(q, keys, values, 1, mask, 5.0, start)
            assert got.dtype == expected.dtype == dtype
            # The order of additions differs.
            assert relative(got, expected) < (1e-5 if dtype == "float32" else 1e-2)


def test_packed_texts_do_not_attend_to_each_other():
    tokens, expected = reference("gemma2")
    model = load("gemma2", stacked=True)
    first, second = tokens[:1, :9], tokens[1:, :12]
    row = jnp.concatenate([first, second], 1)
    segments = jnp.repeat(jnp.array([0, 1]), jnp.array([9, 12]), total_repeat_length=21)
    got = eqx.filter_jit(model)(row, segments[None])
    np.testing.assert_allclose(got[0, :9], expected[0, :9], atol=1e-4)
    # Positions are relative, so the second text need not start at 0.
    np.testing.assert_allclose(got[0, 9:], expected[1, :12], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "llama_linear", "qwen3_moe"])
def test_gradients_of_adapters(name):
    tokens, _ = reference(name)
    segments = np.zeros(tokens.shape, np.int32)
    segments[:, 8:] = 1
    rows = Rows(np.asarray(tokens), segments)
    model = load(name, eqquant.NF4(double_quantization=True), stacked=True)
    model = add_adapters(model, 4, alpha=8.0, key=jax.random.key(0))
    adapters = lambda m: eqx.filter(m, eqquant.trainable_mask(m))
    # Initially one factor is zero, so the gradient of the other would be zero.
    model = eqx.combine(
        jax.tree.map(lambda x: x + 0.05, adapters(model)),
        eqx.filter(model, eqquant.trainable_mask(model), inverse=True),
    )

    def gradients(model, remat):
        trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))

        @eqx.filter_jit
        def fn(trainable, frozen):
            loss = lambda t: strict(losses)(eqx.combine(t, frozen), rows, remat=remat)
            return eqx.filter_grad(lambda t: loss(t)[0])(trainable)

        return fn(trainable, frozen)

    def decode(leaf):
        if not isinstance(leaf, eqquant.arrays.LoraArray):
            return eqquant.dequantize_tree(leaf)
        return leaf.replace(base=eqquant.dequantize(leaf.base))

    is_leaf = lambda x: (
        eqquant.is_quantized(x) or isinstance(x, eqquant.arrays.LoraArray)
    )
    dense = jax.tree.map(decode, model, is_leaf=is_leaf)
    got, expected = gradients(model, True), gradients(dense, False)
    assert len(jax.tree.leaves(got)) == 2 * 7
    assert all(jnp.abs(x).max() > 0 for x in jax.tree.leaves(got))
    assert_close(jax.tree.leaves(got), jax.tree.leaves(expected), 1e-3)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_written_folder(stacked, tmp_path):
    model = load("llama2", stacked=stacked)
    write_model(tmp_path, model, 64, bos_token_id=1)
    again = load_model(tmp_path, stacked=stacked, progress=False)
    assert eqx.tree_equal(again, model)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_written_gemma(offset, tmp_path):
    """GGUF files contain weights of norms plus 1."""
    config = dataclasses.replace(load("gemma3").config, rope_scaling=None)

    def gemma(offset):
        model = Decoder(
            dataclasses.replace(config, norm_offset=offset), key=jax.random.key(0)
        )

        def changed(path, leaf):
            is_norm = "norm" in jax.tree_util.keystr(path)
            return leaf + jnp.arange(leaf.size).reshape(leaf.shape) / 64 * is_norm

        return jax.tree_util.tree_map_with_path(changed, model)

    write_model(tmp_path, gemma(offset), 64)
    again = load_model(tmp_path, stacked=True, progress=False)
    assert again.config == config
    assert_close(jax.tree.leaves(again), jax.tree.leaves(gemma(1.0)), 1e-6)


def test_only_a_plain_llama_can_be_written(tmp_path):
    for name in ("llama3", "qwen3", "gemma2"):
        with pytest.raises(
            ValueError, match="only a Llama or a Gemma 3 without scaled"
        ):
            write_model(tmp_path, load(name), 64)
    assert not list(tmp_path.iterdir())


# GPTQModel made the weights, and transformers computed their logits.
QUANTIZED = HERE.parent / "checkpoints" / "foreign" / "data"


@pytest.mark.parametrize("name", ["gptq_zeros", slow("gptq_awq")])
def test_folder_quantized_by_another_library(name):
    values = load_file(QUANTIZED / name / "expected.safetensors")
    tokens = jnp.asarray(values["tokens"], jnp.int32)
    model = load_model(QUANTIZED / name, progress=False)
    query = model.layers.attention.query.weight
    assert query.format == eqquant.Int4(block_size=32, affine=True)
    expected = forward(eqquant.dequantize_tree(model), tokens)
    # Like the float models above, but with 15-bit activations in products.
    np.testing.assert_allclose(expected, values["logits"], atol=1e-4, rtol=0)
    assert relative(forward(model, tokens), expected) < 1e-3
