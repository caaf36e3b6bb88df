"""Test the benchmark of language models, with a model of a few thousand weights."""

import importlib
import pathlib

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
