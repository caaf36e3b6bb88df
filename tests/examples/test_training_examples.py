"""The examples that train, with minimal sizes."""

import importlib
import pathlib
import sys

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_identical, interrupt_after_saving


pytestmark = pytest.mark.slow

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def test_digits(monkeypatch, tmp_path):
    digits = load("qat_digits", monkeypatch)
    monkeypatch.setattr(digits, "SAVE_EVERY", 1)
    (images, labels), test = digits.load(0)
    assert len(labels) + len(test[1]) == 1797
    cut = lambda data: (data[0][:256], data[1][:256])
    monkeypatch.setattr(digits, "load", lambda seed: (cut((images, labels)), cut(test)))

    run = lambda folder: digits.measure(0, ["ternary"], 2, tmp_path / folder)
    rows = run("whole")
    assert set(rows) == {
        ("float", ""),
        ("float", "longer"),
        ("ternary", "PTQ"),
        ("ternary", "QAT"),
    }
    assert rows["ternary", "QAT"][1] < rows["float", ""][1] / 8
    interrupt_after_saving(digits, monkeypatch, lambda: run("parts"))
    assert run("parts") == rows
    digits.print_table([rows, rows])
    digits.plot([rows, rows], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_language_model(monkeypatch, tmp_path):
    bitnet = load("bitnet_lm", monkeypatch)
    for name, value in {
        "LAYERS": 2,
        "SIZE": 64,
        "CONTEXT": 16,
        "BATCH": 4,
        "STEPS_PER_CALL": 5,
        "SAVE_EVERY": 1,
    }.items():
        monkeypatch.setattr(bitnet, name, value)
    training, validation, vocabulary = bitnet.read_text()
    assert len(training) > 9 * len(validation) > 10**5 and 90 < vocabulary < 200
    model = bitnet.Transformer(vocabulary, key=jax.random.key(0))
    model = eqquant.FakeQuantized(model, None, rules=bitnet.RULES, activations="int8")
    assert {choice.format for choice in model.choices} == {bitnet.BITNET}
    assert len(model.choices) == 7

    def run(folder):
        return bitnet.train(
            model,
            jnp.asarray(training),
            jnp.asarray(validation[:2000]),
            steps=10,
            rate=1e-2,
            path=tmp_path / folder / "ternary.eqx",
            label="ternary",
        )

    trained, history = run("whole")
    assert history[0, 1] < history[0, 0] and np.isfinite(history).all()
    interrupt_after_saving(bitnet, monkeypatch, lambda: run("parts"))
    again, same_history = run("parts")
    assert_identical(eqx.filter(again, eqx.is_array), eqx.filter(trained, eqx.is_array))
    np.testing.assert_array_equal(history, same_history)

    quantized = trained.quantized()
    # One scale per matrix, like BitNet, under the scan over layers.
    assert quantized.blocks.up.weight.scales.shape == (2, 1)
    value = bitnet.validate(quantized, jnp.asarray(validation[:2000]))
    np.testing.assert_allclose(value, history[1, -1], rtol=1e-3)
    bitnet.plot({"float": history, "ternary": history}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_qlora(monkeypatch, tmp_path):
    qlora = load("qlora_minilm", monkeypatch)
    pairs = qlora.read_pairs()
    assert len(pairs) > 3000  # Pairs from the standard library.
    monkeypatch.setattr(qlora, "read_pairs", lambda: pairs[:40])
    arguments = ["--steps", "2", "--batch", "4", "--held-out", "20", "--layers", "1"]
    arguments += ["--save-every", "1"]

    run = lambda folder: qlora.main([*arguments, "--output", str(tmp_path / folder)])
    rows = run("whole")
    floats, quantized = rows["float32"], rows["nf4"]
    assert quantized["frozen"] < floats["frozen"] / 7
    assert quantized["state"] == floats["state"] == 2 * floats["adapters"] + 8
    interrupt_after_saving(qlora, monkeypatch, lambda: run("parts"))
    again = run("parts")
    for name, row in rows.items():
        assert_identical(again[name]["losses"], row["losses"])
        assert again[name]["after"] == row["after"]
    assert (tmp_path / "whole" / "qlora_minilm.png").exists()


def test_distillation(monkeypatch, tmp_path):
    distill = load("distill_minilm", monkeypatch)
    sentences = distill.minilm.read_sentences()[:20]
    monkeypatch.setattr(distill.minilm, "read_sentences", lambda: sentences)
    monkeypatch.setattr(distill, "LENGTHS", (8,))
    # A short word table, because the whole table takes long.
    words = 2200
    tokenize, whole_model = distill.minilm.tokenize, distill.minilm.load_model
    known = lambda tokens, mask: (np.minimum(tokens, words - 1), mask)
    text = np.random.default_rng(0).integers(distill.FIRST_WORD, words, 200)
    cut = lambda model: eqx.tree_at(
        lambda m: m.embeddings.words.weight, model, replace_fn=lambda x: x[:words]
    )
    monkeypatch.setattr(distill.minilm, "tokenize", lambda x: known(*tokenize(x)))
    monkeypatch.setattr(distill.minilm, "load_model", lambda: cut(whole_model()))
    monkeypatch.setattr(distill, "VOCABULARY", words)
    monkeypatch.setattr(distill, "text", lambda: text.astype(np.int32))
    monkeypatch.setattr(distill, "PARTS", (104, 999, 2050, 2100))
    arguments = ["--steps", "4", "--tokens", "64", "--layers", "1", "--save-every", "2"]
    arguments += ["--rows", "1.2", "--sentences", "80"]
    # Tables have a larger share here.
    formats = [distill.BINARY, distill.TERNARY]
    row = distill.ROWS["1.2"]._replace(bits=1.6, formats=formats)
    monkeypatch.setitem(distill.ROWS, "1.2", row)

    run = lambda folder: distill.main([*arguments, "--output", str(tmp_path / folder)])
    before, after = run("whole")
    assert 1.3 < after["bits"] == before["bits"] <= 1.6
    interrupt_after_saving(distill, monkeypatch, lambda: run("parts"))
    assert run("parts")[1]["mean"] == after["mean"] != before["mean"]


def test_split_word_table(monkeypatch):
    distill = load("distill_minilm", monkeypatch)
    monkeypatch.setattr(distill, "PARTS", (2, 5, 24))
    rng = np.random.default_rng(0)
    table = rng.standard_normal((40, 16)).astype(np.float32)
    # If errors matter in four directions only, four vectors suffice.
    some = np.linalg.qr(rng.standard_normal((16, 4)))[0]
    monkeypatch.setattr(distill, "RANK", 4)
    monkeypatch.setattr(distill, "CUT", 1)
    words = distill.Words(jnp.asarray(table), jnp.asarray(some @ some.T))
    assert [part.num_embeddings for part in words.frequent] == [2, 3, 19]
    assert [part.weight.shape for part in words.rare] == [(16, 1), (16, 3)]
    rows = np.asarray(jax.vmap(words)(jnp.arange(40)))
    assert_identical(rows[:24], table[:24])
    error = rows[24:] - table[24:]
    assert np.max(np.abs(error)) > 0.1
    np.testing.assert_allclose(error @ some, 0, atol=1e-2)


def test_training_excludes_the_evaluation(monkeypatch):
    distill = load("distill_minilm", monkeypatch)
    monkeypatch.setattr(distill, "documentation", lambda: ["One.", "Two.", "Three."])
    monkeypatch.setattr(distill.minilm, "read_sentences", lambda: ["Two."])
    assert len(distill.text()) == 4
