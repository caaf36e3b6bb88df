"""Test the benchmark of language models, with a model of a few thousand weights."""

import importlib
import pathlib

import jax
import numpy as np
import pytest
from eqquant.formats import Trellis


ROOT = pathlib.Path(__file__).parent.parent
MODEL = ROOT / "tests" / "examples" / "data" / "llama" / "llama3"


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


def test_answers(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module("language_accuracy")
    written = iter(["Par|is.", *["Yes."] * 4])
    answer = lambda *args: ([next(written)], 1.0)
    monkeypatch.setattr(script.comparison, "sample", answer)

    class Text:
        encode_chat = staticmethod(lambda messages: [1])
        tokenizer = type("T", (), {"decode": staticmethod("".join)})

    answers = script.Answers(Text)
    answers.add("nf4", None)
    answers.write(tmp_path / "answers.md")
    lines = (tmp_path / "answers.md").read_text().splitlines()
    assert lines[:5] == [
        "**What is the capital of France?**",
        "",
        "| weights | answer |",
        "| --- | --- |",
        "| nf4 | Par\\|is. |",
    ]
    assert lines.count("| nf4 | Yes. |") == len(script.QUESTIONS) - 1
