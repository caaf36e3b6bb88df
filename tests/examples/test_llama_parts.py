"""Parts of examples/llama: folders, packing, sampling, adapter files."""

import collections
import itertools
import json
import pathlib
import shutil
import sys
import types

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_identical, slow, strict
from hypothesis import given, strategies as st
from safetensors.numpy import load_file, save_file


HERE = pathlib.Path(__file__).parent
DATA = HERE / "data" / "llama"
EXAMPLE = HERE.parents[1] / "examples" / "llama"
sys.path.insert(0, str(EXAMPLE))

from architectures import config_of  # noqa: E402
from config import Config, Llama3Scaling, rope_frequencies  # noqa: E402
from joined import join  # noqa: E402
from load import can_stack, load_model  # noqa: E402
from lora import add_adapters, load_adapters, save_adapters  # noqa: E402
from model import Decoder, unstack  # noqa: E402
from packing import batch_at, pack  # noqa: E402
from sampling import most_likely, Sampling  # noqa: E402
from text import Text  # noqa: E402
from train_small import BEGIN, END, train_tokenizer  # noqa: E402


def load(folder, **options):
    return load_model(folder, progress=False, **options)


def values_of(name):
    return json.loads((DATA / name / "config.json").read_text())


#
# config.json
#

UNSUPPORTED = {
    "model_type": ("llama", dict(model_type="mamba"), "model_type='mamba'"),
    "no model_type": ("llama3", dict(model_type=None), "model_type=None"),
    "classifier": (
        "llama3",
        dict(architectures=["LlamaForSequenceClassification"]),
        "LlamaForSequenceClassification",
    ),
    "yarn": (
        "llama2",
        dict(rope_parameters={"rope_type": "yarn", "factor": 4.0}),
        "rope_parameters of type 'yarn'",
    ),
    "an older yarn": (
        "llama2",
        dict(rope_parameters=None, rope_scaling={"type": "yarn", "factor": 4.0}),
        "rope_scaling of type 'yarn'",
    ),
    "no factor": ("llama2", dict(rope_parameters={"rope_type": "linear"}), "factor"),
    "activation": ("qwen2", dict(hidden_act="relu"), "hidden_act='relu'"),
    "bias": ("llama3", dict(mlp_bias=True), "mlp_bias=True"),
    "dense layers": ("qwen3_moe", dict(mlp_only_layers=[0]), "mlp_only_layers"),
    "kinds of layers": ("gemma2", dict(layer_types=["mamba"] * 2), "'mamba'"),
    "too few": ("gemma2", dict(layer_types=["full_attention"]), "1 entries"),
    "missing": ("mistral", dict(hidden_size=None), "no hidden_size"),
    "quantized": ("qwen3", dict(quantization_config={}), "quant_method=None"),
    "activations": (
        "qwen3",
        dict(quantization_config={"quant_method": "bitnet"}),
        "quant_method='bitnet' is not supported, only 'awq'",
    ),
    "activations of a group": (
        "qwen3",
        dict(
            quantization_config={
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"input_activations": {"num_bits": 8}}},
            }
        ),
        "has input_activations",
    ),
    "both ways": ("gemma3", dict(use_bidirectional_attention=True), "bidirectional"),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_unsupported_settings_raise_and_are_named(what):
    name, changes, message = UNSUPPORTED[what]
    name = "llama2" if name == "llama" else name
    values = {**values_of(name), **changes}
    values = {k: v for k, v in values.items() if v is not None}
    with pytest.raises(ValueError, match="config.json.*" + message):
        config_of(values)


def test_config_json_of_older_versions():
    for name in ("llama2", "llama3", "llama_linear", "mistral", "qwen2", "gemma3"):
        values = values_of(name)
        expected = config_of(values)
        rope = values.pop("rope_parameters")
        layers = values.pop("layer_types", None)
        if name == "gemma3":
            values["sliding_window_pattern"] = 2
            assert layers == ["sliding_attention", "full_attention"]
            values["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = dict(rope["full_attention"])
        rope = dict(rope)
        values["rope_theta"] = rope.pop("rope_theta")
        values["rope_scaling"] = rope if rope["rope_type"] != "default" else None
        assert config_of(values) == expected
    # Like the published Llama 2 and Mistral: without theta and head size.
    values = values_of("llama2")
    del values["rope_parameters"], values["head_dim"]
    config = config_of(values)
    assert config.rope_theta == 10_000 and config.head_size == 32 // 4


def test_scaled_positions_of_llama_3():
    config = config_of(values_of("llama3"))
    scaling = config.rope_scaling
    assert isinstance(scaling, Llama3Scaling)
    plain = 10_000.0 ** -(np.arange(8) / 8)
    turns = (
        16 * plain / (2 * np.pi)
    )  # Measured in units of the original context length.
    got = rope_frequencies(config)
    np.testing.assert_allclose(got[turns < 1], plain[turns < 1] / 4, rtol=1e-6)
    # No frequency out of eight completes four turns in the original context.
    assert (got[turns >= 1] > plain[turns >= 1] / 4).all()


#
# Folders
#


@pytest.fixture
def folder(tmp_path):
    return pathlib.Path(shutil.copytree(DATA / "llama3", tmp_path / "model"))


def test_incomplete_folder_raises(folder):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(
        {k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors"
    )
    with pytest.raises(ValueError, match=name):
        load(folder)
    save_file({**tensors, "model.extra": np.ones(3)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="model.extra"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="has no config.json"):
        load(folder)


def test_stacked_and_separate_layers_have_equal_weights():
    for name in ("llama2", "qwen3_moe"):  # The first folder has sharded weights.
        apart, stacked = load(DATA / name, stacked=False), load(DATA / name)
        assert_identical(
            eqx.filter(apart, eqx.is_array), eqx.filter(unstack(stacked), eqx.is_array)
        )
    assert load(DATA / "qwen2", dtype=jnp.bfloat16).norm.weight.dtype == jnp.bfloat16


def test_layers_of_different_formats_are_no_single_stack(tmp_path):
    weight = jnp.ones((64, 64))
    for formats, expected in ((["nf4", "nf4"], True), (["nf4", "int8"], False)):
        layers = [{"w": eqquant.quantize(weight, format)} for format in formats]
        eqquant.save(tmp_path / "model.safetensors", {"layers": layers})
        found = eqquant.checkpoints.describe_checkpoint(tmp_path / "model.safetensors")
        source = types.SimpleNamespace(tensors=found.tensors)
        assert can_stack(source, False) == expected
        assert can_stack(source, "all")


@pytest.mark.parametrize("name", ["llama3", slow("mixtral")])
def test_adapters_in_files(name, tmp_path):
    stacked = load(DATA / name)
    apart = load(DATA / name, stacked=False)
    adapted = add_adapters(stacked, 2, alpha=3.0, key=jax.random.key(0))
    kind = values_of(name)["model_type"]
    save_adapters(tmp_path, adapted, kind)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    start = "base_model.model.model.layers.1.self_attn.q_proj"
    assert tensors[f"{start}.lora_A.weight"].shape == (2, 32)
    assert tensors[f"{start}.lora_B.weight"].shape == (64, 2)
    back = load_adapters(tmp_path, apart, kind)
    arrays = lambda m: eqx.filter(m, eqx.is_array)
    assert_identical(arrays(back), arrays(unstack(adapted)))
    assert back.layers[0].attention.query.weight.scale == 1.5

    # PEFT files may contain adapters for some modules only.
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    few = {k: v for k, v in tensors.items() if "q_proj" in k}
    save_file(few, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="has no tensor .*_proj.lora_A"):
        load_adapters(tmp_path, apart, kind)
    path.write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    back = load_adapters(tmp_path, apart, kind)
    assert isinstance(back.layers[0].attention.query.weight, eqquant.arrays.LoraArray)
    assert not isinstance(back.layers[0].attention.key.weight, eqquant.arrays.LoraArray)
    for bad in (dict(use_dora=True), dict(peft_type="IA3"), dict(bias="all")):
        path.write_text(json.dumps({**config, **bad}))
        with pytest.raises(ValueError, match=next(iter(bad))):
            load_adapters(tmp_path, apart, kind)
    with pytest.raises(ValueError, match="adapter_config.json"):
        load_adapters(tmp_path / "nowhere", apart, kind)
    with pytest.raises(ValueError, match="no adapters"):
        save_adapters(tmp_path, apart, "llama")


#
# Text
#


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(
        ["a house, and the house of a friend. <user> <bot>"] * 4, 290
    )


@pytest.fixture
def texts(tokenizer, tmp_path):
    """Return a function that makes the `Text` of a folder with the given files."""

    def make(stop=(), **files):
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            content = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name.replace("__", ".")).write_text(content)
        return Text(tmp_path, stop)

    return make


TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
<{{ message.role }}> {{ message.content }}
{%- endfor %}
{%- if add_generation_prompt %} <bot>{% endif %}
"""


def test_texts_and_chats(texts, tokenizer):
    options = dict(bos_token={"content": BEGIN}, eos_token=END, chat_template=TEMPLATE)
    text = texts(
        tokenizer_config__json=options,
        generation_config__json=dict(eos_token_id=[1, 7]),
    )
    assert text.stop == {1, 7}
    assert text.encode("a house")[0] == 0
    assert text.encode_document("a house")[-1] == 1
    chat = [dict(role="user", content="a house"), dict(role="bot", content="a friend")]
    # The prompt is not part of the answer, and special tokens occur once.
    got = text.encode_chat(chat[:1])
    expected = f"{BEGIN}<user> a house <bot>"
    assert got == tokenizer.encode(expected, add_special_tokens=False).ids
    assert got.count(0) == 1
    assert text.encode_document(chat)[-1] == 1
    with pytest.raises(ValueError, match="no tools"):
        text.encode_chat([dict(role="tool", content="")])


def test_templates_are_sandboxed(texts):
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% if %}",
    ):
        text = texts(tokenizer_config__json=dict(chat_template=source))
        with pytest.raises(ValueError, match="template"):
            text.encode_chat([dict(role="user", content="a")])


def test_texts_of_incomplete_folders(texts, tmp_path):
    text = texts(stop=[END])
    assert text.stop == {1}
    with pytest.raises(ValueError, match="no chat template"):
        text.encode_chat([dict(role="user", content="a")])
    with pytest.raises(ValueError, match="'<nothing>' is not a token"):
        texts(stop=["<nothing>"])
    with pytest.raises(ValueError, match="no tokenizer.json"):
        Text(tmp_path / "nowhere")


#
# Packing
#

some_texts = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1)


@given(some_texts, st.integers(1, 7))
def test_all_tokens_except_the_first_are_predicted_once(texts, length):
    rows = pack(texts, length)
    counted = (rows.segments[:, 1:] == rows.segments[:, :-1]) & (
        rows.segments[:, 1:] >= 0
    )
    assert rows.tokens.shape == rows.segments.shape
    assert rows.tokens.shape[1] == length + 1
    before, after = rows.tokens[:, :-1][counted], rows.tokens[:, 1:][counted]
    pairs = itertools.chain.from_iterable(itertools.pairwise(text) for text in texts)
    assert list(zip(before.tolist(), after.tolist(), strict=True)) == list(pairs)


@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 3))
def test_an_epoch_has_each_row_once(count, size, seed):
    rows = pack([list(range(count + 1))], 1)
    assert len(rows.tokens) == count
    steps = -(-2 * count // size)
    seen = [batch_at(rows, i, size, seed).tokens[:, 0].tolist() for i in range(steps)]
    flat = list(itertools.chain.from_iterable(seen))
    assert sorted(flat[:count]) == sorted(flat[count : 2 * count]) == list(range(count))


#
# Sampling
#


def test_sampled_tokens():
    probabilities = np.array([0.05, 0.4, 0.25, 0.2, 0.1])
    logits = jnp.log(jnp.asarray(probabilities))[None].repeat(2000, 0)
    draw = lambda **how: np.asarray(Sampling(**how)(logits, jax.random.key(0)))
    assert set(draw(temperature=0.0)) == {1}
    for how, allowed in {
        (1.0, 0, 1.0): {0, 1, 2, 3, 4},
        (1.0, 9, 1.0): {0, 1, 2, 3, 4},
        (1.0, 2, 1.0): {1, 2},
        (1.0, 0, 0.39): {1},
        (1.0, 0, 0.7): {1, 2, 3},
        # The remaining probabilities are 0.47, 0.29 and 0.24.
        (1.0, 3, 0.7): {1, 2},
        (0.5, 0, 0.8): {1, 2},
    }.items():
        drawn = draw(temperature=how[0], top_k=how[1], top_p=how[2])
        assert set(drawn) == allowed
        expected = probabilities ** (1 / how[0]) * np.isin(range(5), list(allowed))
        shares = np.bincount(drawn, minlength=5) / len(drawn)
        # Four standard deviations of a share out of 2,000.
        assert np.abs(shares - expected / expected.sum()).max() < 4 * 0.5 / 2000**0.5
    counts = collections.Counter(draw(temperature=1e4, top_k=0, top_p=1.0))
    assert min(counts.values()) > 300


def test_the_most_likely_token_is_the_first_of_the_largest(rng):
    for vocabulary in (101, 1024):  # One block per token, and two blocks.
        logits = rng.integers(-9, 10, (40, vocabulary)).astype(np.float32)
        logits[0], logits[1, 50:] = -np.inf, np.inf
        logits[2], logits[3, -1] = 0, 99
        assert_identical(most_likely(logits), np.argmax(logits, -1).astype(np.int32))


@pytest.mark.parametrize(
    "stacked, rotate", [(True, False), (True, True), (False, False)]
)
def test_joined_layers_compute_the_same(stacked, rotate):
    config = Config(
        vocabulary=64,
        size=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_size=16,
        hidden=96,
        query_key_value_bias=True,
    )
    model = Decoder(config, key=jax.random.key(0))
    formats = {"*.value.weight": "int8", "*.mlp.*.weight": "nf4"}
    formats |= {"*.query.weight": "nf4", "*.key.weight": "nf4"}
    options = {"rotate": rotate, "progress": False}
    model = eqquant.quantize_tree(model, rules=formats, **options)
    model = model if stacked else unstack(model)
    joined = join(model)
    layer = joined.layers if stacked else joined.layers[1]
    attention, mlp = layer.attention, layer.mlp
    assert attention.query.sizes == (64, 32) and attention.key is None
    assert attention.value.weight.format == eqquant.Int8()  # Another format.
    assert mlp.gate.weight.shape[-2:] == (192, 64) and mlp.up is None
    assert eqx.tree_equal(join(joined), joined)
    # Dense weights are not copied.
    dense = unstack(Decoder(config, key=jax.random.key(0)))
    assert join(dense).layers[0].mlp.up.weight is dense.layers[0].mlp.up.weight
    tokens = jnp.arange(10)[None]
    run = eqx.filter_jit(strict(lambda model, tokens: model(tokens)))
    # Kernels may sum in another order for another number of rows.
    assert_close(run(joined, tokens), run(model, tokens), 1e-5)
    shapes = lambda tree: [x.shape for x in jax.tree.leaves(tree) if eqx.is_array(x)]
    abstract = eqx.filter_eval_shape(lambda: model)
    assert [x.shape for x in jax.tree.leaves(join(abstract))] == shapes(joined)


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_large_vocabularies_are_sampled_like_small_ones(rng, spread):
    # The smaller spread needs more tokens than are selected without sorting.
    logits = (spread * rng.normal(size=1_500)).astype(np.float32)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    order = np.argsort(-logits)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    allowed = order[before < 0.8]
    assert (len(allowed) > 512) == (spread < 1)
    sample = jax.jit(Sampling(temperature=1.0, top_p=0.8))
    keys = jax.random.split(jax.random.key(0), 40)
    drawn = [sample(jnp.tile(logits, (50, 1)), key) for key in keys]
    assert np.isin(drawn, allowed).all()
    # Four standard deviations of the share of the more likely half.
    half = allowed[: len(allowed) // 2]
    share = probabilities[half].sum() / probabilities[allowed].sum()
    assert abs(np.isin(drawn, half).mean() - share) < 4 * 0.5 / 2000**0.5


def test_bad_sampling():
    for bad in (dict(temperature=-1.0), dict(top_k=-1), dict(top_p=0.0)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Sampling(**bad)
    with pytest.raises(ValueError, match="temperature"):
        Sampling(temperature=float("nan"))
