"""Test the benchmark of Whisper, with a model of random weights."""

import importlib
import pathlib

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest


BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
SIZE, VOCABULARY = 64, 300


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("speech_accuracy")
    monkeypatch.setattr(module._whisper, "START", [1, 2])
    monkeypatch.setattr(module._whisper, "END", 0)
    monkeypatch.setattr(module._whisper, "suppressed", lambda: np.asarray([3]))
    return module


def random_model(whisper):
    """Return a Whisper with one layer on each side."""
    keys = iter(jax.random.split(jax.random.key(0), 40))
    linear = lambda a, b: eqx.nn.Linear(a, b, key=next(keys))
    norms = lambda count: [eqx.nn.LayerNorm(SIZE) for _ in range(count)]
    attention = lambda: whisper.Attention(*(linear(SIZE, SIZE) for _ in range(4)))

    def layer(cross):
        ends = linear(SIZE, 128), linear(128, SIZE)
        return whisper.Layer(norms(2 + bool(cross)), attention(), cross, *ends)

    convolutions = [
        eqx.nn.Conv1d(inputs, SIZE, 3, stride, padding=1, key=next(keys))
        for inputs, stride in ((80, 1), (SIZE, 2))
    ]
    # With larger weights, the most likely token would have all the probability.
    tokens = 0.2 * jax.random.normal(next(keys), (VOCABULARY, SIZE))
    lengths = 20, 30
    positions = [jax.random.normal(next(keys), (n, SIZE)) for n in lengths]
    ends = norms(2)
    return whisper.Whisper(
        convolutions,
        [layer(None)],
        [layer(attention())],
        ends,
        eqx.nn.Embedding(weight=tokens),
        positions,
    )


def random_speech(script, model, count, seed):
    rng = np.random.default_rng(seed)
    mel = rng.normal(size=(count, 80, 40)).astype(np.float32)
    sentences = [f"{i} {i + 1} {i + 2}" for i in range(count)]
    return script.Speech(sentences, mel, script.transcribe(model, mel))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fewer rows than inputs")
def test_rows(script, monkeypatch, tmp_path):
    model = random_model(script._whisper)
    calibration, held_out = (random_speech(script, model, n, n) for n in (40, 10))
    monkeypatch.setitem(script.ROWS, "at most 7 bits", script.Row(bits=7.0))
    monkeypatch.setattr(script, "WITH_TRELLIS", (script.NF4, eqquant.Int8()))
    names = ["float", "int8", "nf4", "nf4, calibrated", "at most 7 bits"]
    decode = lambda ids: " ".join(map(str, ids))
    inputs = calibration, held_out, decode, tmp_path
    found = list(script.rows_of(model, names, *inputs))
    assert [name for name, *_ in found] == names
    bits = {name: bits for name, bits, _ in found}
    rows = {name: row for name, _, row in found}
    assert bits["float"] == 16 and bits["nf4"] == bits["nf4, calibrated"]
    assert bits["at most 7 bits"] <= 7 < bits["int8"] < 16
    assert rows["float"][:3] == (0, 0, 1)
    assert 0 < rows["int8"].mean < rows["nf4, calibrated"].mean < rows["nf4"].mean
    assert rows["at most 7 bits"].mean < rows["nf4"].mean
    assert all(row.errors > 0.5 for row in rows.values())


def test_bits_of_a_format(script):
    """Positions, biases and norms count 16 bits, and each scale counts."""
    model = script.with_half(random_model(script._whisper))
    quantized, bits = script.quantized(model, script.Row(script.NF4), None)
    leaves = jax.tree_util.tree_leaves_with_path(model)
    small = sum(x.size for path, x in leaves if not script.is_matrix(path, x))
    ends = [model.tokens.weight, *(layer.weight for layer in model.convolutions)]
    matrices = [x for path, x in leaves if script.is_matrix(path, x)]
    inner = sum(x.size for x in matrices) - sum(x.size for x in ends)
    codes = sum(x.size + 4 * len(x) for x in ends)  # One float32 scale per row.
    size = sum(x.size for _, x in leaves)
    # NF4 has a scale of 16 bits for each 64 values.
    assert bits == pytest.approx((16 * small + 4.25 * inner + 8 * codes) / size)
    assert quantized.positions[0].dtype == jnp.float16


def test_rows_of_other_libraries(script, monkeypatch, tmp_path):
    def quantized_by(library, folder, checkpoint, cache, variants, timeout):
        assert (library, variants) == ("hqq", ["int3, block size 64"])
        with np.load(folder / "weights.npz") as weights:
            new = {name: weights[name] + 1 for name in weights.files}
        np.savez(folder / "new.npz", **new)
        return [{"file": folder / "new.npz", "bytes": 1000}]

    peers = importlib.import_module("_peer_weights")
    monkeypatch.setattr(peers, "quantized_by", quantized_by)
    model = script.with_half(random_model(script._whisper))
    peers = script.Peers(model, tmp_path)
    assert sorted(x.shape for x in peers.weights.values()) == sorted(
        [(SIZE, SIZE)] * 12 + [(128, SIZE), (SIZE, 128)] * 2
    )
    changed, bits = peers.quantized(*script.ROWS["HQQ int3"].peer)
    old, new = (x.decoder[0].cross.key for x in (model, changed))
    np.testing.assert_array_equal(new.weight, old.weight + 1)
    np.testing.assert_array_equal(new.bias, old.bias)
    assert isinstance(changed.tokens.weight, eqquant.QuantizedArray)
    rest = eqquant.trees.nbytes(changed)
    rest -= sum(x.nbytes for x in peers.weights.values())
    size = sum(x.size for x in jax.tree.leaves(model))
    assert bits == pytest.approx(8 * (rest + 1000) / size)


def test_padding_does_not_count(script):
    tokens = np.array([[1, 2, 7, 0, 0], [1, 2, 0, 0, 0], [1, 2, 7, 8, 9]])
    expected = [[True, True, False], [True, False, False], [True, True, True]]
    np.testing.assert_array_equal(script._whisper.is_text(tokens), expected)


def test_padding_is_not_calibrated(script):
    model = script.with_half(random_model(script._whisper))
    speech = random_speech(script, model, 2, 0)
    tokens = np.zeros((2, script.LENGTH), np.int32)
    tokens[:, :3] = 1, 2, 7
    tokens[1, 3] = 8
    with pytest.warns(UserWarning, match="fewer rows than inputs"):
        stats = script.calibrate(model, speech._replace(tokens=tokens))
    # Text `1 2 7` predicts two tokens, and reads its first token as well.
    assert stats.weights["decoder.0.attention.key.weight"].rows == 3 + 4
    assert stats.weights["decoder.0.cross.key.weight"].rows == 2 * 20


def test_word_errors(script):
    speech = script._speech
    assert speech.word_error_rate(["The cat sat."], ["the cat sat"]) == 0
    spoken = ["The cat sat.", "On a mat!"]
    assert speech.word_error_rate(["the hat sat", "on the a"], spoken) == 3 / 6


def test_sentences(script, capsys):
    """Sentences of calibration and evaluation differ."""
    assert [len(some) for some in script.LISTS] == [10] * 20
    sentences = script.sentences_of(script.LISTS)
    assert len(set(sentences)) == len(sentences) and min(map(len, sentences)) > 20
    with pytest.raises(SystemExit):
        script.main(["--calibration-lists", "18", "--lists", "3"])
    assert "--lists 3 overlap" in capsys.readouterr().err
