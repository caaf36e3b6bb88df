"""Train a sentence encoder of one or two bits a weight to do what the float one does.

The encoder is that of minilm.py. Each row is a budget of bits for the whole model,
shared out among the weights by calibration, as in calibrate_minilm.py. GPTQ rounds
them, and training improves the result: scales, norms, biases, and the codes of binary
and ternary weights, the words among these.

The text is the documentation of Python itself, in which a part of the tokens are
replaced by random ones, as in calibrate_minilm.py. It shares no sentence with the
evaluation; and no choice was made by the second half of that, which has columns of its
own.

    python examples/distill_minilm.py
    python examples/distill_minilm.py --rows 2.1 --steps 300 --output /tmp/distilled

A run that was stopped goes on from its last checkpoint; `--fresh` starts over.
"""

import argparse
import dataclasses
import pathlib
import time
from typing import NamedTuple

import _checkpoint
import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import minilm
import numpy as np
import optax
from _calibration_data import documentation, FIRST_WORD, VOCABULARY
from calibrate_minilm import calibrate, COLUMNS, measure, RULES
from jaxtyping import Array, Bool, Float, Int
from tokenizers import Tokenizer


HERE = pathlib.Path(__file__).parent
LENGTHS = 16, 40  # Of the sentences of a batch, in turn.

SHORT = {"scale_dtype": "bfloat16"}
BINARY, TERNARY = eqquant.Binary(**SHORT), eqquant.Ternary(**SHORT)
NF2 = eqquant.NF2(block_size=None)
NF3 = eqquant.NF3(block_size=None)
NF4 = eqquant.NF4(block_size=None, scale_search=True, **SHORT)


# Small tables, of which few bits cost much.
TABLES = RULES | {"*positions*": eqquant.NF3()}


class Row(NamedTuple):
    """Bits a weight, of the whole model; what they are shared out among; how many steps
    to train, and how fast."""

    bits: float
    formats: list[eqquant.Format]
    steps: int
    rate: float


ROWS = {
    "2.1": Row(2.1, [BINARY, TERNARY, NF3, NF4], 1500, 1e-3),
    "1.2": Row(1.2, [BINARY, NF2, NF3, NF4], 1500, 1e-3),
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
    layers = eqquant.dequantize_tree(model.layers)  # Once, for all products.

    def one(
        tokens: Int[Array, " length"], mask: Bool[Array, " length"]
    ) -> tuple[Float[Array, " size"], list[Float[Array, "length size"]]]:
        hidden = [model.embeddings(tokens)]
        for layer in layers:
            hidden.append(layer(hidden[-1], mask))
        mean = jnp.sum(hidden[-1], 0, where=mask[:, None]) / jnp.sum(mask)
        hidden = [jnp.where(mask[:, None], x, 0) for x in hidden]
        return mean / jnp.linalg.norm(mean), hidden

    return jax.vmap(one)(*batch)


def loss(outputs, expected) -> Float[Array, ""]:
    """The errors of the layers, of the embeddings, and of how similar sentences are:
    the last is what says which are the nearest."""
    (new, hidden), (old, of_teacher) = outputs, expected
    square = lambda x: jnp.sum(jnp.square(x))
    layers = zip(hidden, of_teacher, strict=True)
    layers = jnp.mean(jnp.stack([square(x - y) / square(y) for x, y in layers]))
    others = 1 - jnp.eye(len(new))
    similar, wanted = (x @ x.T * others for x in (new, old))
    cosine = jnp.mean(jnp.sum(new * old, -1))
    return layers + 2 * (1 - cosine) + 2 * square(similar - wanted) / square(wanted)


def start(row: Row, model, sentences: int):
    """The student, and a function that makes the result of what it has become."""
    stats = calibrate(model, sentences)
    base = eqquant.quantize_tree(model, None, rules=TABLES)
    budget = int(row.bits * eqquant.tree_nbytes(model) / 32)
    allocation = eqquant.allocate(base, budget, row.formats, stats, rotate=True)
    print(allocation, flush=True)
    student = eqquant.quantize_tree(
        base, None, rules=allocation, calibration=stats, rotate=True
    )
    # Scales are in float32 in training, which is faster.
    short = {
        path: (format, axis)
        for path, (format, axis) in allocation.items()
        if format in (BINARY, TERNARY)
    }
    wide = {
        path: (dataclasses.replace(format, scale_dtype="float32"), axis)
        for path, (format, axis) in short.items()
    }
    student = eqquant.FakeQuantized(_floats(student), None, rules=wide, rotate=True)

    def finish(quantized):
        return eqquant.quantize_tree(_floats(quantized), None, rules=short, rotate=True)

    return student, finish


def _floats(model):
    """The model with its binary and ternary matrices as floats."""

    def one(x):
        is_short = is_quantized(x) and isinstance(x.format, shortest)
        return x.dequantize() if is_short else x

    shortest = eqquant.Binary | eqquant.Ternary
    arrays = eqquant.QuantizedArray | eqquant.RotatedArray
    is_quantized = lambda x: isinstance(x, arrays)
    return jax.tree.map(one, model, is_leaf=is_quantized)


def kinds(trained):
    """What each array is."""

    def kind(x):
        return "words" if x.size > 5e6 else "matrices" if x.size > 1e5 else "others"

    return jax.tree.map(kind, trained)


def train(name: str, model, stream, watch, options):
    """The quantized model before and after training, and how many seconds of the
    processor it took up to there."""
    row = ROWS[name]
    steps, rate = options.steps or row.steps, options.rate or row.rate
    began = time.process_time()
    student, finish = start(row, model, options.sentences)
    schedule = optax.warmup_cosine_decay_schedule(0, rate, steps // 20, steps)
    # Matrices are trained slower than all else: a step has few of the words.
    rates = {"words": 1.0, "matrices": 0.4, "others": 1.0}
    optimiser = optax.chain(
        optax.scale_by_adam(b2=0.98),
        optax.partition({k: optax.scale(v) for k, v in rates.items()}, kinds),
        optax.scale_by_learning_rate(schedule),
    )
    state = eqquant.Distillation(student, optimiser)
    before = finish(state.model(student))
    prepared = time.process_time() - began
    seconds = np.array(prepared)
    print(f"{name}: mean cosine of the first half {watch(before):.4f}", flush=True)
    path = options.output / f"distill_minilm_{name}.eqx"
    # A checkpoint of another run is of no use.
    run = {"steps": steps, "rate": rate}
    run |= {k: getattr(options, k) for k in ("sentences", "tokens", "layers")}
    if not options.fresh:
        state, seconds = _checkpoint.restore(path, (state, seconds), **run)
    if state.steps > 0:
        print(f"{name}: going on from step {int(state.steps)} of {path}")
    while (first := int(state.steps)) < steps:
        last = min(first + options.save_every, steps)
        batches = [batch_at(i, stream, options.tokens) for i in range(first, last)]
        began = time.process_time()
        quantized, state = eqquant.distill(
            student, model, forward, batches, optimiser, loss=loss, state=state
        )
        seconds = seconds + time.process_time() - began
        _checkpoint.save(path, (state, seconds), **run)
        print(
            f"{name}, step {last}: loss {float(state.loss):.4f}, mean cosine of the "
            f"first half {watch(quantized):.4f}, {float(seconds):.0f} s of CPU",
            flush=True,
        )
    return (before, prepared), (finish(state.model(student)), float(seconds))


COLUMNS = COLUMNS | {"seconds": ("seconds of CPU", "{:.0f}")}


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--steps", type=int, help="by default those of the row")
    parser.add_argument("--rate", type=float, help="of learning")
    parser.add_argument("--sentences", type=int, default=480, help="to calibrate on")
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
        stages = train(name, model, stream, watch, options)
        titles = f"at most {name} bits", f"at most {name} bits, trained"
        for title, (quantized, seconds) in zip(titles, stages, strict=True):
            embeddings = minilm.embed_all(quantized, *sentences)
            row = measure(title, quantized, model, embeddings, expected)
            rows.append(row | {"seconds": seconds})
    print()
    minilm.print_table(rows, COLUMNS)
    return rows


if __name__ == "__main__":
    main()
