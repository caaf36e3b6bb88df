"""Train a sentence encoder of ternary or binary weights to do what the float one does.

The encoder is that of minilm.py. The text is the documentation of Python itself, in
which a part of the tokens are replaced by random ones, as in calibrate_minilm.py. It
shares no sentence with the evaluation; and no choice was made by the second half of
that, which has columns of its own.

    python examples/distill_minilm.py
    python examples/distill_minilm.py --rows ternary --steps 300 --output /tmp/distilled

A run that was stopped goes on from its last checkpoint; `--fresh` starts over.
"""

import argparse
import pathlib
import time

import _checkpoint
import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import minilm
import numpy as np
import optax
from _calibration_data import documentation, FIRST_WORD, VOCABULARY
from calibrate_minilm import COLUMNS, measure
from jaxtyping import Array, Bool, Float, Int
from tokenizers import Tokenizer


HERE = pathlib.Path(__file__).parent
LENGTHS = 16, 40  # Of the sentences of a batch, in turn.

SHORT = {"scale_dtype": "bfloat16"}
# Small tables, of which few bits cost much.
TABLES = {"*token_types*": "int8", "*positions*": eqquant.NF4(**SHORT)}
# The layers, and the table of words.
ROWS = {
    "ternary": (
        eqquant.Ternary(**SHORT),
        eqquant.NF2(block_size=None, fit="least_squares", **SHORT),
    ),
    "binary": (eqquant.Binary(**SHORT), eqquant.Binary(block_size=128, **SHORT)),
}


#
# The data
#


def text() -> Int[np.ndarray, " tokens"]:
    """All of the documentation, its sentences in random order."""
    sentences = sorted(set(documentation()) - set(minilm.read_sentences()))
    tokenizer = Tokenizer.from_file(str(minilm.WEIGHTS / "tokenizer.json"))
    tokenizer.no_padding()
    encoded = tokenizer.encode_batch(sentences, add_special_tokens=False)
    order = np.random.default_rng(0).permutation(len(encoded))
    return np.concatenate([np.array(encoded[i].ids, np.int32) for i in order])


Batch = tuple[Int[np.ndarray, "batch length"], Bool[np.ndarray, "batch length"]]


def batch_at(i: int, stream: Int[np.ndarray, " tokens"], size: int) -> Batch:
    """`size` tokens, and their mask. Of each sentence a tenth to nine tenths of the
    tokens are replaced: half of them by any, half by frequent ones."""
    rng = np.random.default_rng([1, i])
    length = LENGTHS[i % len(LENGTHS)]
    count = size // length
    starts = rng.integers(0, len(stream) - length, count)
    tokens = stream[starts[:, None] + np.arange(length - 2)]
    # The vocabulary is sorted by frequency.
    ranks = VOCABULARY - FIRST_WORD
    frequent = np.exp(rng.uniform(np.log(50), np.log(ranks), tokens.shape))
    ranks = np.where(
        rng.random(tokens.shape) < 0.5, frequent, rng.uniform(0, ranks, tokens.shape)
    )
    share = rng.uniform(0.1, 0.9, (count, 1))
    words = FIRST_WORD + ranks.astype(np.int32)
    tokens = np.where(rng.random(tokens.shape) < share, words, tokens)
    first, last = 101, 102  # [CLS] and [SEP].
    tokens = np.pad(tokens, ((0, 0), (1, 1)), constant_values=((0, 0), (first, last)))
    return tokens.astype(np.int32), np.ones(tokens.shape, bool)


#
# Training
#


def forward(model, batch: Batch):
    """The sentences, and what goes from layer to layer."""

    def one(
        tokens: Int[Array, " length"], mask: Bool[Array, " length"]
    ) -> tuple[Float[Array, " size"], list[Float[Array, "length size"]]]:
        hidden = [model.embeddings(tokens)]
        for layer in model.layers:
            hidden.append(layer(hidden[-1], mask))
        mean = jnp.sum(hidden[-1], 0, where=mask[:, None]) / jnp.sum(mask)
        hidden = [jnp.where(mask[:, None], x, 0) for x in hidden]
        return mean / jnp.linalg.norm(mean), hidden

    return jax.vmap(one)(*batch)


def train(name: str, model, stream, watch, options):
    """The quantized model, and how many seconds of the processor training took."""
    format, words = ROWS[name]
    rules = TABLES | {"*embeddings.words*": words}
    student = eqquant.quantize_tree(model, None, rules=rules)
    student = eqquant.FakeQuantized(student, format)
    rate = optax.warmup_cosine_decay_schedule(
        0, options.rate, options.steps // 20, options.steps
    )
    optimiser = optax.adam(rate, b2=0.98)
    state = eqquant.Distillation(student, optimiser)
    seconds = np.zeros(())
    path = options.output / f"distill_minilm_{name}.eqx"
    # A checkpoint of another run is of no use.
    run = {k: getattr(options, k) for k in ("steps", "rate", "tokens", "layers")}
    if not options.fresh:
        state, seconds = _checkpoint.restore(path, (state, seconds), **run)
    if state.steps > 0:
        print(f"{name}: going on from step {int(state.steps)} of {path}")
    while (first := int(state.steps)) < options.steps:
        last = min(first + options.save_every, options.steps)
        batches = [batch_at(i, stream, options.tokens) for i in range(first, last)]
        start = time.process_time()
        quantized, state = eqquant.distill(
            student, model, forward, batches, optimiser, state=state
        )
        seconds = seconds + time.process_time() - start
        _checkpoint.save(path, (state, seconds), **run)
        print(
            f"{name}, step {last}: loss {float(state.loss):.4f}, mean cosine of the "
            f"first half {watch(quantized):.4f}, {float(seconds):.0f} s of CPU",
            flush=True,
        )
    return state.model(student), float(seconds)


COLUMNS = COLUMNS | {"seconds": ("seconds of CPU", "{:.0f}")}


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--rate", type=float, default=5e-4, help="of learning")
    parser.add_argument("--tokens", type=int, default=480, help="of a batch")
    parser.add_argument("--layers", type=int, default=6, help="of the encoder to use")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--fresh", action="store_true", help="do not resume")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "output")
    options = parser.parse_args(arguments)

    model = minilm.load_model()
    model = eqx.tree_at(lambda m: m.layers, model, model.layers[: options.layers])
    sentences = minilm.tokenize(minilm.read_sentences())
    expected = minilm.embed_all(model, *sentences)
    half = len(expected) // 2

    def watch(quantized) -> float:
        some = minilm.embed_all(quantized, *(x[:half] for x in sentences))
        return minilm.cosines(some, expected[:half]).mean()

    stream = text()
    print(f"{len(stream):,} tokens of text")
    rows = []
    for name in options.rows:
        quantized, seconds = train(name, model, stream, watch, options)
        embeddings = minilm.embed_all(quantized, *sentences)
        row = measure(name, quantized, model, embeddings, expected)
        rows.append(row | {"seconds": seconds})
    print()
    minilm.print_table(rows, COLUMNS)
    return rows


if __name__ == "__main__":
    main()
