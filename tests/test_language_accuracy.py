"""Test the benchmark of language models, with a model of a few thousand weights."""

import importlib
import pathlib

import eqquant
import jax
import numpy as np
import pytest
from eqquant.formats import Trellis


ROOT = pathlib.Path(__file__).parent.parent
MODELS = ROOT / "tests" / "examples" / "data" / "llama"
MODEL = MODELS / "llama3"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fewer rows than inputs")
def test_rows(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module("language_accuracy")
    model = script.load.load_model(MODEL, stacked=True, progress=False)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.config.vocabulary, (12, 64), np.int32)
    names = ["float", "int8", "nf3, calibrated", "nf3, calibrated, search 8"]
    names += ["nf3, calibrated, distilled", "at most 8.5 bits"]
    names += ["nf4, calibrated, folded"]
    formats = Trellis(bits=4, block_size=32), *script.ROWS["at most 4.25 bits"].formats
    budget = script.Row(None, True, bits=8.5, formats=formats)
    monkeypatch.setitem(script.ROWS, "at most 8.5 bits", budget)
    # Random tokens: training on other rows cannot help, so train on these rows.
    how = tokens[:8], tokens[8:], np.tile(tokens[8:], (10, 1)), tmp_path
    rows = list(script.rows_of(model, names, *how))
    assert [row[0] for row in rows] == names
    assert rows[0][2:4] == ("0.0000", "0.000") and rows[0][-1] == "100.0%"
    divergences = [float(row[2]) for row in rows]
    assert divergences[0] < divergences[1] < divergences[2]
    bits = [float(row[1]) for row in rows]
    assert bits[0] == 32 and bits[2] == bits[3] == bits[4] < bits[1] < 14
    assert divergences[4] < divergences[2]
    assert bits[5] <= 8.5 and divergences[5] < divergences[2]
    assert divergences[6] < divergences[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_layers_are_tuned_one_after_the_other(name, monkeypatch, rng):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module("language_accuracy")
    model = script.load.load_model(MODELS / name, stacked=True, progress=False)
    tokens = rng.integers(0, model.config.vocabulary, (4, 16), np.int32)
    nearest = script.comparison.quantize(model, "nf3")
    tuned = script.tuned(nearest, model, tokens, steps=30)
    expected = [script.comparison.log_probabilities(model, row) for row in tokens]
    compared = (
        script.comparison.compare(m, tokens, expected) for m in (tuned, nearest)
    )
    better, worse = (found.mean for found in compared)
    assert better < 0.8 * worse
    assert len(tuned.layers) == model.config.layers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "gemma3"])
@pytest.mark.filterwarnings("ignore:.*fewer rows than inputs")
def test_matrices_are_corrected_in_order(name, monkeypatch, rng):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module("language_accuracy")
    model = script.load.load_model(MODELS / name, stacked=True, progress=False)
    tokens = rng.integers(0, model.config.vocabulary, (40, 64), np.int32)
    tokens, held_out = tokens[:32], tokens[32:]
    stats = script.calibration(model, tokens, False)
    calibrated = script.comparison.quantize(model, "nf3", stats, rotate=True)
    corrected = script.corrected(model, tokens, "nf3", rotate=True)
    expected = [script.comparison.log_probabilities(model, row) for row in held_out]
    compared = (
        script.comparison.compare(m, held_out, expected)
        for m in (corrected, calibrated)
    )
    better, worse = compared
    assert better.mean < 0.9 * worse.mean
    assert better.bytes == worse.bytes


def test_importance_of_llama_cpp(monkeypatch):
    """The numbers by which llama.cpp weighs the error of each column."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module("language_accuracy")
    source = script.load.open_model(MODEL)
    model = script.load.load_model(source, stacked=True, progress=False)
    tokens = np.random.default_rng(1).integers(0, model.config.vocabulary, (2, 32))
    stats = script.calibration(model, tokens.astype(np.int32), False)
    means = script.importance(source, stats)
    layers = range(model.config.layers)
    assert {f"model.layers.{i}.self_attn.q_proj.weight" for i in layers} < means.keys()
    assert not any("embed" in name for name in means)
    x = np.asarray(model.embedding.weight, float)[tokens.reshape(-1)]
    scale = np.asarray(model.layers.attention_norm.weight, float)[0]
    x *= scale / np.sqrt((x**2).mean(-1, keepdims=True) + model.config.norm_eps)
    # Sums in float32.
    for name in ("q_proj", "v_proj"):
        found = means[f"model.layers.0.self_attn.{name}.weight"]
        np.testing.assert_allclose(found, (x**2).mean(0), rtol=1e-5)


def test_trellis_codes_are_in_whole_blocks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module("language_accuracy")
    model = script.load.load_model(MODEL, stacked=True, progress=False)
    sizes = {x.shape[-1] for x in jax.tree.leaves(model.layers) if x.ndim == 3}
    row = script.in_whole_blocks(script.ROWS["trellis3, calibrated"], model)
    assert len(sizes) > 1 and all(size % row.format.block_size == 0 for size in sizes)
    assert row.format.bits == 3
    unchanged = script.ROWS["nf4, calibrated"]
    assert script.in_whole_blocks(unchanged, model) == unchanged


class _Text:
    encode_chat = staticmethod(lambda messages: [1])
    tokenizer = type("T", (), {"decode": staticmethod("".join)})


def test_answers(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module("_answers")
    count = len(script.QUESTIONS)
    written = iter(["Par|is.", *["Yes."] * (count - 1), *["Oui. " * 60] * count])
    answer = lambda *args: (next(written), 1.0)
    monkeypatch.setattr(script.comparison, "sample", answer)
    path = tmp_path / "answers.md"
    script.Answers(_Text, path).add("nf4", None)
    lines = path.read_text().splitlines()
    assert lines[:6] == [
        "**What is the capital of France?**",
        "",
        "| weights | answer |",
        "| --- | --- |",
        "| nf4 | Par\\|is. |",
        "",
    ]
    assert lines.count("| nf4 | Yes. |") == count - 1
    # A second run keeps the rows of the first, and long answers are cut.
    script.Answers(_Text, path).add("nf3", None)
    again = path.read_text().splitlines()
    assert again[:5] == lines[:5] and again[5].endswith("Oui. Oui. ... |")
    assert len(again) == len(lines) + count and len(again[5]) < 160
    # A new answer replaces the row with the same name.
    written = iter(["No."] * count)
    script.Answers(_Text, path).add("nf4", None)
    replaced = path.read_text().splitlines()
    assert replaced[4:6] == ["| nf4 | No. |", again[5]] and len(replaced) == len(again)


def _other_library(monkeypatch, rounded):
    """Let the rows of other libraries contain `rounded(weight)`, in 4.5 bits."""
    peers = importlib.import_module("_peer_weights")

    def quantized_by(library, folder, checkpoint, cache, variants, timeout):
        assert (library, len(variants)) == ("hqq", 1)
        if variants == ["int3, block size 64"]:
            return [{"variant": variants[0], "version": "hqq 1", "failed": "No."}]
        with np.load(folder / "weights.npz") as weights:
            new = {name: rounded(weights[name]) for name in weights.files}
        np.savez(folder / "new.npz", **new)
        nbytes = sum(weight.size for weight in new.values()) * 9 // 16
        return [{"file": folder / "new.npz", "bytes": nbytes}]

    monkeypatch.setattr(peers, "quantized_by", quantized_by)


def test_rows_of_other_libraries(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module("language_accuracy")
    source = script.load.open_model(MODEL)
    model = script.load.load_model(source, stacked=True, progress=False)
    tokens = np.random.default_rng(0).integers(0, model.config.vocabulary, (3, 32))
    tokens = tokens.astype(np.int32)
    models = {}
    inputs = tokens, tokens[:1], tokens[:0], tmp_path, source, models.__setitem__
    names = ["HQQ int4", "HQQ int3"]
    _other_library(monkeypatch, lambda weight: weight + 0.01)
    ((name, bits, divergence, *_),) = script.rows_of(model, names, *inputs)
    assert name == "HQQ int4" and float(divergence) > 0
    assert "NOT MEASURED: HQQ int3: hqq 1: No." in capsys.readouterr().err
    layers, new = model.layers, models[name].layers
    up = np.asarray(layers.mlp.up.weight) + np.float32(0.01)
    np.testing.assert_array_equal(new.mlp.up.weight, up)
    norm = layers.attention_norm.weight
    np.testing.assert_array_equal(new.attention_norm.weight, norm)
    assert isinstance(models[name].embedding.weight, eqquant.QuantizedArray)
    arrays = jax.tree.leaves(model)
    matrices = sum(x.size for x in jax.tree.leaves(layers) if x.ndim == 3)
    norms = sum(x.size for x in arrays if x.ndim == 1 or x.shape == norm.shape)
    ends = sum(x.size for x in arrays) - matrices - norms
    codes = sum(
        eqquant.quantize(x.weight, "int8").nbytes
        for x in (model.embedding, model.head)
        if x is not None
    )
    size = matrices + norms + ends
    total = 4.5 * matrices + 32 * norms + 8 * codes
    assert float(bits) == pytest.approx(total / size, abs=0.01)


def test_quantizers(monkeypatch):
    """Each row names a quantizer, and each variant has the block size of the docs."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    quantizers = importlib.import_module("_quantizers")
    script = importlib.import_module("language_accuracy")
    decoders = quantizers.find("decoder")
    assert decoders.keys() | quantizers.find("encoder").keys() == (
        quantizers.find().keys()
    )
    peers = [row.peer for row in script.ROWS.values() if row.peer]
    assert {library for library, _ in peers} <= decoders.keys()
    assert "gptqmodel" not in quantizers.find("encoder")
    assert all("block size 64" in v or "per row" in v for _, v in peers)
