"""`examples/calibrate_minilm.py`, with little data."""

import importlib
import pathlib
import sys

import equinox as eqx
import numpy as np
import pytest


EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_calibration_helps(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    for name in ("minilm", "calibrate_minilm"):
        sys.modules.pop(name, None)
    example = importlib.import_module("calibrate_minilm")
    # One layer out of six, and three formats out of seven; the others are similar.
    minilm = example.minilm
    model, sentences = minilm.load_model(), minilm.read_sentences()
    model = eqx.tree_at(lambda m: m.layers, model, model.layers[:1])
    # Frequent words only, because the whole table would take most of the time.
    words = 4096
    model = eqx.tree_at(
        lambda m: m.embeddings.words.weight, model, replace_fn=lambda x: x[:words]
    )
    tokenize = minilm.tokenize
    known = lambda tokens, mask: (np.minimum(tokens, words - 1), mask)
    monkeypatch.setattr(minilm, "tokenize", lambda x: known(*tokenize(x)))
    monkeypatch.setattr(sys.modules["_calibration_data"], "VOCABULARY", words)
    monkeypatch.setattr(minilm, "load_model", lambda: model)
    monkeypatch.setattr(minilm, "read_sentences", lambda: sentences[:80])
    monkeypatch.setattr(example, "FORMATS", example.FORMATS[1::2])
    names = ["nf4", "nf4, GPTQ, rotated"]
    options = ["--sentences", "40", "--rows", *names, "--bits", "4.35"]
    monkeypatch.setattr(sys, "argv", ["calibrate_minilm.py", *options])
    example.main()
    lines = capsys.readouterr().out.splitlines()
    found = [line.split(": mean cosine ") for line in lines if ": mean cosine" in line]
    plain, better, mixed = (float(value) for _, value in found)
    assert plain < better and plain < mixed and better > 0.98


def test_calibration_and_evaluation_share_no_sentence(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    data = importlib.import_module("_calibration_data")
    texts = ["A sentence.", "Another sentence that is calibrated on."]
    monkeypatch.setattr(data, "documentation", lambda: iter(texts))
    seen = []

    def tokenize(texts):
        seen.extend(texts)
        return np.full((len(texts), 8), 5, np.int32), np.ones((len(texts), 8), bool)

    ((tokens, mask),) = data.calibration_batches(9, tokenize, texts[:1])
    assert seen == texts[1:]
    assert len(tokens) == 1 and tokens[0, 0] == 5
    assert mask.all() and (tokens != 5).any()
