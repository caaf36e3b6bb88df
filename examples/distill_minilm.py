"""Distill a float sentence encoder into one with one or two bits per weight.

The encoder is the one in minilm.py. Each row of the table is a bit budget for the whole
model, which calibration allocates to the weights, as in calibrate_minilm.py. Half of
all weights are word embeddings. Their table is split by frequency: frequent words get
more bits, and rare words are a product of two matrices. GPTQ rounds the weights. Then
training improves scales, norms, biases, and the codes of binary and ternary weights.

The text is the documentation of Python, with random tokens in place of some of the
tokens, as in calibrate_minilm.py. It shares no sentence with the evaluation. The
second half of the evaluation has separate columns, and influenced no choice.

    python examples/distill_minilm.py
    python examples/distill_minilm.py --rows 2.1 --steps 300 --output /tmp/distilled

An interrupted run resumes from its last checkpoint; `--fresh` starts again.
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
from calibrate_minilm import COLUMNS, measure
from jaxtyping import Array, Bool, Float, Int
from scipy.linalg import hadamard
from tokenizers import Tokenizer


HERE = pathlib.Path(__file__).parent
LENGTHS = 16, 24  # Lengths of the sentences in a batch, in turn.
REPLACED = 0.9, 0.2  # Largest share of replaced tokens: start, end.

SHORT = {"scale_dtype": "bfloat16"}
BINARY, TERNARY = eqquant.Binary(**SHORT), eqquant.Ternary(**SHORT)
NF2 = eqquant.NF2(block_size=None)
NF3 = eqquant.NF3(block_size=None)
NF4 = eqquant.NF4(block_size=None, fit="search", **SHORT)


# Small tables, which are sensitive to few bits.
TABLES = {"*token_types*": "int8", "*positions*": eqquant.NF3()}


# Boundaries between the parts of the word table. The vocabulary starts with 104 special
# tokens, then unused tokens (which cause a warning and get the smallest format), single
# characters, and words by frequency.
PARTS = 104, 999, 3000, 6000
# Coefficients per word in the last part, in two groups; the first are most important.
RANK, CUT = 128, 64


class Row(NamedTuple):
    """A row of the table: bits per weight of the whole model, the formats to allocate,
    the number of training steps, and the learning rate."""

    bits: float
    formats: list[eqquant.formats.Format]
    steps: int
    rate: float


ROWS = {
    "2.1": Row(2.1, [BINARY, TERNARY, NF2, NF3, NF4], 700, 4e-4),
    "1.2": Row(1.2, [BINARY, NF2, NF3, NF4], 1500, 7e-4),
}


#
# The data
#


def text() -> Int[np.ndarray, " tokens"]:
    """Return all of the documentation as tokens, with its sentences in random order."""
    sentences = sorted(set(documentation()) - set(minilm.read_sentences()))
    tokenizer = Tokenizer.from_file(str(minilm.WEIGHTS / "tokenizer.json"))
    tokenizer.no_padding()
    encoded = tokenizer.encode_batch(sentences, add_special_tokens=False)
    order = np.random.default_rng(0).permutation(len(encoded))
    return np.concatenate([np.array(encoded[i].ids, np.int32) for i in order])


Batch = tuple[Int[np.ndarray, "batch length"], Bool[np.ndarray, "batch length"]]


def batch_at(
    i: int, stream: Int[np.ndarray, " tokens"], size: int, most: float
) -> Batch:
    """Return `size` tokens and their mask.

    A random share of the tokens of each sentence is replaced, between a tenth and
    `most`: half of them by any token, half by frequent tokens.
    """
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
    share = rng.uniform(0.1, most, (count, 1))
    words = FIRST_WORD + ranks.astype(np.int32)
    tokens = np.where(rng.random(tokens.shape) < share, words, tokens)
    first, last = 101, 102  # [CLS] and [SEP].
    tokens = np.pad(tokens, ((0, 0), (1, 1)), constant_values=((0, 0), (first, last)))
    return tokens.astype(np.int32), np.ones(tokens.shape, bool)


#
# The model
#


class Words(eqx.Module):
    """A word table in parts, each with its own format.

    Rare words are a product of coefficients, in two groups, and a basis.
    """

    frequent: list[eqx.nn.Embedding]
    rare: list[eqx.nn.Embedding]
    basis: eqx.nn.Linear

    def __init__(
        self, table: Float[Array, "words size"], gram: Float[Array, "size size"]
    ):
        *frequent, rare = jnp.split(table, PARTS)
        coefficients, basis = factors(rare, gram, RANK)
        rare = jnp.split(coefficients, [CUT], axis=1)
        self.frequent = [eqx.nn.Embedding(weight=part) for part in frequent]
        self.rare = [eqx.nn.Embedding(weight=part) for part in rare]
        layer = eqx.nn.Linear(RANK, len(basis), False, key=jax.random.key(0))
        self.basis = eqx.tree_at(lambda layer: layer.weight, layer, basis)

    def __call__(self, token: Int[Array, ""]) -> Float[Array, " size"]:
        parts = (*self.frequent, self.rare[0])
        ends = np.cumsum([part.num_embeddings for part in parts])
        starts = [0, *ends[:-1]]
        at = lambda part, first: jnp.clip(token - first, 0, part.num_embeddings - 1)
        found = [part(at(part, starts[-1])) for part in self.rare]
        row = self.basis(jnp.concatenate(found))
        for part, first, end in zip(self.frequent, starts, ends, strict=False):
            is_here = (token >= first) & (token < end)
            row = jnp.where(is_here, part(at(part, first)), row)
        return row


def factors(
    table: Float[Array, "words size"], gram: Float[Array, "size size"], rank: int
) -> tuple[Float[Array, "words rank"], Float[Array, "size rank"]]:
    """Return coefficients and a basis that minimise the error weighted by `gram`."""
    values, vectors = np.linalg.eigh(np.asarray(gram, np.float64))
    root = np.sqrt(values + 1e-3 * values.mean())
    scaled = np.asarray(table, np.float64) @ (vectors * root)
    first = np.linalg.eigh(scaled.T @ scaled)[1][:, ::-1][:, :rank]
    coefficients, basis = scaled @ first, (vectors / root) @ first
    return jnp.asarray(coefficients, jnp.float32), jnp.asarray(basis, jnp.float32)


def in_parts(model, batches: list[Batch]):
    """Return the model with its word table in parts."""
    path = "embeddings.words.weight"
    rules = {"*layers*": None} | dict.fromkeys(TABLES)
    stats = eqquant.calibrate(embed, model, batches[:4], rules=rules)
    words = Words(model.embeddings.words.weight, stats.weights[path].gram)
    return eqx.tree_at(lambda m: m.embeddings.words, model, words)


def embed(model, batch: Batch):
    return jax.vmap(model)(*batch)


#
# Training
#


def forward(model, batch: Batch):
    """Return sentence embeddings and the hidden states between layers."""
    layers = eqquant.dequantize_tree(model.layers)  # Computed once for all products.

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
    """Return the error of hidden states, of embeddings, and of pairwise similarities.

    The similarities determine which sentences are nearest.
    """
    (new, hidden), (old, of_teacher) = outputs, expected
    square = lambda x: jnp.sum(jnp.square(x))
    layers = zip(hidden, of_teacher, strict=True)
    layers = jnp.mean(jnp.stack([square(x - y) / square(y) for x, y in layers]))
    others = 1 - jnp.eye(len(new))
    similar, wanted = (x @ x.T * others for x in (new, old))
    cosine = jnp.mean(jnp.sum(new * old, -1))
    return layers + 2 * (1 - cosine) + 2 * square(similar - wanted) / square(wanted)


def start(row: Row, model, batches: list[Batch]):
    """Return the student, and a function that converts it to the result."""
    budget = int(row.bits * eqquant.trees.nbytes(model) / 32)
    model = in_parts(model, batches)
    rules = dict.fromkeys(TABLES)  # They have fixed formats.
    stats = eqquant.calibrate(embed, model, batches, rules=rules)
    base = eqquant.quantize_tree(model, None, rules=TABLES)
    allocation = eqquant.allocate(base, budget, row.formats, stats, rotate=True)
    print(allocation, flush=True)
    student = eqquant.quantize_tree(
        base, None, rules=allocation, calibration=stats, rotate=True
    )
    # Codes of rare words are frozen, because few steps contain rare words.
    # Training uses float32 scales, which are faster.
    short = {
        path: (format, axis)
        for path, (format, axis) in allocation.items()
        if format in (BINARY, TERNARY) and "rare" not in path
    }
    wide = {
        path: (dataclasses.replace(format, scale_dtype="float32"), axis)
        for path, (format, axis) in short.items()
    }
    student = eqquant.FakeQuantized(
        _masters(student, base), None, rules=wide, rotate=True
    )

    def finish(quantized):
        return eqquant.quantize_tree(_floats(quantized), None, rules=short, rotate=True)

    return student, finish


def _masters(quantized, model):
    """Return `quantized` with float weights in place of its binary weights.

    Signs come from GPTQ, and magnitudes from `model`. A small magnitude lets training
    flip the sign, and the mean magnitude is the scale.
    """

    def one(x, weight):
        if not (is_rotated(x) and isinstance(x.format, eqquant.Binary)):
            return x
        matrix = hadamard(x.block) / x.block**0.5
        rotated = lambda x: (x.reshape(-1, len(matrix)) @ matrix).reshape(x.shape)
        return rotated(jnp.sign(x.base.dequantize()) * jnp.abs(rotated(weight)))

    is_rotated = lambda x: isinstance(x, eqquant.arrays.RotatedArray)
    new = jax.tree.map(one, quantized, model, is_leaf=is_rotated)
    rare = lambda m: m.embeddings.words.rare
    return _floats(eqx.tree_at(rare, new, rare(quantized)))


def _floats(model):
    """Return the model with float matrices in place of binary and ternary matrices,
    except for rare words."""

    def one(path, x):
        is_short = is_quantized(x) and isinstance(x.format, shortest)
        is_trained = is_short and "rare" not in jax.tree_util.keystr(path)
        return x.dequantize() if is_trained else x

    shortest = eqquant.Binary | eqquant.Ternary
    arrays = eqquant.QuantizedArray | eqquant.arrays.RotatedArray
    is_quantized = lambda x: isinstance(x, arrays)
    return jax.tree_util.tree_map_with_path(one, model, is_leaf=is_quantized)


def kinds(trained):
    """Return the kind of each array."""

    def kind(path, x):
        if x.size < 1e4:
            return "others"
        return "words" if "words" in jax.tree_util.keystr(path) else "matrices"

    return jax.tree_util.tree_map_with_path(kind, trained)


def train(name: str, model, stream, watch, options):
    """Yield the quantized model before and after training, with the CPU seconds so
    far."""
    row = ROWS[name]
    steps, rate = options.steps or row.steps, options.rate or row.rate
    began = time.process_time()
    size, last = 2 * options.tokens, options.sentences // 40
    batches = [batch_at(-i, stream, size, REPLACED[0]) for i in range(-last, 0)]
    student, finish = start(row, model, batches)
    schedule = optax.warmup_cosine_decay_schedule(0, rate, steps // 20, steps)
    # Matrices have a smaller learning rate, because a step contains few of the words.
    rates = {"words": 1.0, "matrices": 0.4, "others": 1.0}
    optimiser = optax.chain(
        optax.scale_by_adam(b2=0.98),
        optax.partition({k: optax.scale(v) for k, v in rates.items()}, kinds),
        optax.scale_by_learning_rate(schedule),
    )
    state = eqquant.training.DistillationState(student, optimiser)
    before = finish(state.model(student))
    prepared = time.process_time() - began
    seconds = np.array(prepared)
    print(f"{name}: mean cosine of the first half {watch(before):.4f}", flush=True)
    path = options.output / f"distill_minilm_{name}.eqx"
    # Ignore the checkpoint of another run.
    run = {"steps": steps, "rate": rate}
    run |= {k: getattr(options, k) for k in ("sentences", "tokens", "layers")}
    if not options.fresh:
        state, seconds = _checkpoint.restore(path, (state, seconds), **run)
    if state.steps > 0:
        print(f"{name}: resuming from step {int(state.steps)} of {path}")
    while (first := int(state.steps)) < steps:
        last = min(first + options.save_every, steps)
        most = lambda i: REPLACED[0] + (REPLACED[1] - REPLACED[0]) * i / steps
        batches = [
            batch_at(i, stream, options.tokens, most(i)) for i in range(first, last)
        ]
        began = time.process_time()
        quantized, state = eqquant.training.distill(
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
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=ROWS,
        default=list(ROWS),
        help="Train for these budgets, in bits per weight. The default is all of them.",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="Train for this many steps. By default, each budget has its own number.",
    )
    parser.add_argument(
        "--rate",
        type=float,
        help="Use this learning rate. By default, each budget has its own rate.",
    )
    parser.add_argument(
        "--sentences",
        type=int,
        default=480,
        help="Calibrate on this many sentences (default: %(default)s).",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=480,
        help="Put this many tokens into a batch (default: %(default)s).",
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=6,
        help="Use this number of layers, from the first layer on (default: "
        "%(default)s).",
    )
    parser.add_argument(
        "--save-every",
        type=int,
        default=100,
        help="Save the state after this many steps (default: %(default)s).",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="Start again instead of resuming an interrupted run.",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=HERE / "output",
        help="Write checkpoints to this folder (default: examples/output).",
    )
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
