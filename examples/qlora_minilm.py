"""Fine-tune a real sentence encoder with adapters beside NF4 weights and float weights.

The encoder is the one in `minilm.py`, without adapter code. The task is to match
the names of functions in Python's standard library to their summaries: "statistics
pvariance" should be nearest to "Return the population variance of ``data``.". The
example reads the pairs at run time from the docstrings of the installed standard
library (PSF licence). A thousand pairs are held out.

    python examples/qlora_minilm.py
    python examples/qlora_minilm.py --steps 300 --rank 16 --output /tmp/qlora

An interrupted run resumes from its last checkpoint; `--fresh` starts again.
"""

import argparse
import ast
import pathlib
import re
import resource
import time

import _checkpoint
import _standard_library
import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jaxtyping import Array, Float
from minilm import load_model, tokenize
from tqdm import tqdm


matplotlib.use("Agg")
import matplotlib.pyplot as plt


HERE = pathlib.Path(__file__).parent

# Formats of the frozen weights.
BASES = {
    "float32": None,
    "nf4": eqquant.NF4(double_quantization=True),
}
NAME_TOKENS, SUMMARY_TOKENS = 12, 24


#
# The data
#


def in_words(name: str) -> str:
    """Split a name into words: `xml.dom.ElementInfo` -> `xml dom element info`."""
    name = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return re.sub(r"[._]+", " ", name).strip().lower()


def read_pairs() -> list[tuple[str, str]]:
    """Return the names and summaries of the public functions and classes of the
    standard library. A summary is the first paragraph of a docstring."""
    names: dict[str, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in getattr(node, "body", []):
            kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            if not isinstance(child, kinds) or child.name.startswith("_"):
                continue
            name = f"{prefix} {in_words(child.name)}"
            summary = (ast.get_docstring(child) or "").split("\n\n")[0]
            summary = " ".join(summary.split())
            if 20 <= len(summary) <= 200:
                names.setdefault(
                    summary, name
                )  # Keep the first name with a given summary.
            if isinstance(child, ast.ClassDef):
                visit(child, name)

    for name, tree in _standard_library.modules():
        if not any(p.startswith("_") and p != "__init__" for p in name.split(".")):
            visit(tree, in_words(name))
    return [(name, summary) for summary, name in names.items()]


def tokens_of(texts: list[str], length: int):
    """Return tokens and mask, both `(texts, length)`."""
    tokens, mask = (x[:, :length] for x in tokenize(texts))
    wide = ((0, 0), (0, length - tokens.shape[1]))
    return np.pad(tokens, wide), np.pad(mask, wide)


def load_data(held_out: int, seed: int) -> tuple[tuple, tuple]:
    """Return names and summaries as tokens, for training and for evaluation."""
    pairs = read_pairs()
    order = np.random.default_rng(seed).permutation(len(pairs))
    names = tokens_of([pairs[i][0] for i in order], NAME_TOKENS)
    summaries = tokens_of([pairs[i][1] for i in order], SUMMARY_TOKENS)
    split = lambda part: tuple((t[part], m[part]) for t, m in (names, summaries))
    return split(slice(held_out, None)), split(slice(held_out))


#
# Training
#


def embed(model, inputs) -> Float[Array, "batch size"]:
    # JAX would print the model itself in each trace.
    return jax.vmap(lambda *row: model(*row))(*inputs)


def loss_of(trainable, frozen, batch, key) -> Float[Array, ""]:
    """Return the contrastive loss: names against all summaries, and the reverse."""
    model = eqx.combine(trainable, frozen)
    model = eqquant.training.with_dropout_key(model, key)
    names, summaries = (embed(model, inputs) for inputs in batch)
    similar = names @ summaries.T / 0.05
    matching = jnp.arange(len(similar))
    losses = [
        optax.softmax_cross_entropy_with_integer_labels(scores, matching).mean()
        for scores in (similar, similar.T)
    ]
    return sum(losses) / 2


def accuracy(model, held_out) -> tuple[float, float]:
    """Return the top-1 accuracy and the mean reciprocal rank."""
    embed_some = eqx.filter_jit(embed)
    names, summaries = (
        np.concatenate(
            [
                np.asarray(embed_some(model, (tokens[i : i + 250], mask[i : i + 250])))
                for i in range(0, len(tokens), 250)
            ]
        )
        for tokens, mask in held_out
    )
    similar = names @ summaries.T
    rank = (similar > similar.diagonal()[:, None]).sum(1)
    return float((rank == 0).mean()), float((1 / (1 + rank)).mean())


def train(name: str, model, data, options) -> dict:
    """Train adapters beside the weights of `model`. Return the results and the
    costs."""
    model = eqquant.lora_tree(
        model,
        options.rank,
        key=jax.random.key(options.seed),
        alpha=2 * options.rank,
        dropout=0.05,
    )
    trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))
    rate = optax.warmup_cosine_decay_schedule(
        0, options.rate, max(1, options.steps // 10), options.steps
    )
    optimiser = optax.adamw(rate, weight_decay=0.01)
    state = optimiser.init(trainable)

    @eqx.filter_jit
    def step(trainable, frozen, state, batch, key):
        value_and_gradients = eqx.filter_value_and_grad(loss_of)
        loss, gradients = value_and_gradients(trainable, frozen, batch, key)
        updates, state = optimiser.update(gradients, state, trainable)
        return eqx.apply_updates(trainable, updates), state, loss

    count = len(data[0][0])

    def batch_at(i: int):
        rows = np.random.default_rng([options.seed, i]).choice(
            count, options.batch, replace=False
        )
        return tuple((tokens[rows], mask[rows]) for tokens, mask in data)

    key = jax.random.key(options.seed + 1)
    example = (trainable, frozen, state, batch_at(0), key)
    compiled = step.lower(*example).compile()
    memory = compiled.compiled.memory_analysis()

    path = options.output / f"qlora_minilm_{name}.eqx"
    # Ignore the checkpoint of another run.
    run = {k: v for k, v in vars(options).items() if k not in ("output", "fresh")}
    losses = np.full(options.steps, np.nan, np.float32)
    progress = (trainable, state, losses, np.zeros((), np.int32))
    if not options.fresh:
        progress = _checkpoint.restore(path, progress, **run)
    trainable, state, losses, done = progress
    if done:
        print(f"{name}: resuming from step {int(done)} of {path}")
    start = time.perf_counter()
    steps = range(int(done), options.steps)
    for i in tqdm(steps, desc=name, initial=int(done), total=options.steps):
        trainable, state, loss = compiled(
            trainable, frozen, state, batch_at(i), jax.random.fold_in(key, i)
        )
        losses[i] = loss
        if (i + 1) % options.save_every == 0 or i + 1 == options.steps:
            progress = (trainable, state, losses, np.int32(i + 1))
            _checkpoint.save(path, progress, **run)
    seconds = (time.perf_counter() - start) / max(1, len(steps))

    adapters = eqquant.trees.nbytes(trainable)
    return {
        "model": eqquant.training.with_dropout_key(
            eqx.combine(trainable, frozen), None
        ),
        "losses": losses,
        "seconds": seconds,
        "frozen": eqquant.trees.nbytes(frozen),
        "adapters": adapters,
        "state": eqquant.trees.nbytes(state),
        "temporary": memory.temp_size_in_bytes,
    }


#
# The output
#


def print_table(rows: dict[str, dict]) -> None:
    columns = {
        "frozen weights, MB": lambda r: f"{r['frozen'] / 1e6:.1f}",
        "adapters, MB": lambda r: f"{r['adapters'] / 1e6:.2f}",
        "Adam's state, MB": lambda r: f"{r['state'] / 1e6:.2f}",
        "step's memory, MB": lambda r: f"{r['temporary'] / 1e6:.0f}",
        "s a step": lambda r: f"{r['seconds']:.2f}",
        "before": lambda r: f"{r['before'][0]:.1%}",
        "after": lambda r: f"{r['after'][0]:.1%}",
        "MRR before": lambda r: f"{r['before'][1]:.3f}",
        "MRR after": lambda r: f"{r['after'][1]:.3f}",
    }
    print(f"\n{'adapters beside':18}" + "".join(f"{name:>12}" for name in rows))
    for title, show in columns.items():
        print(f"{title:18}" + "".join(f"{show(row):>12}" for row in rows.values()))


def plot(rows: dict[str, dict], path: pathlib.Path) -> None:
    # One above the other, so that a phone shows all panels.
    figure, axes = plt.subplots(3, 1, figsize=(5.6, 8), layout="constrained")
    colours = dict(zip(rows, ("#33508c", "#e0823d"), strict=False))
    for name, row in rows.items():
        losses = row["losses"]
        width = max(1, len(losses) // 15)
        smooth = np.convolve(losses, np.ones(width) / width, "valid")
        axes[0].plot(losses, color=colours[name], alpha=0.2, linewidth=1)
        steps = np.arange(len(smooth)) + (width - 1) / 2
        axes[0].plot(steps, smooth, color=colours[name], label=f"{name} + LoRA")
    axes[0].set_title("Loss")
    axes[0].set_xlabel("step")
    axes[0].legend(frameon=False)
    bars = [
        (
            f"{name}, {when}",
            row[when][0],
            colours[name],
            0.45 if when == "before" else 1,
        )
        for when in ("before", "after")
        for name, row in rows.items()
    ]
    drawn = axes[1].bar(
        [bar[0].replace(", ", "\n") for bar in bars],
        [100 * bar[1] for bar in bars],
        color=[bar[2] for bar in bars],
    )
    for bar, (*_, alpha) in zip(drawn, bars, strict=True):
        bar.set_alpha(alpha)
    axes[1].bar_label(drawn, fmt="%.1f", padding=2)
    axes[1].margins(y=0.1)
    axes[1].set_title("Right summary nearest, held out, %")
    parts = {"frozen": "weights", "adapters": "adapters", "state": "Adam's state"}
    left = np.zeros(len(rows))
    for (part, label), shade in zip(parts.items(), ("0.35", "0.6", "0.8"), strict=True):
        sizes = [row[part] / 1e6 for row in rows.values()]
        axes[2].barh(list(rows), sizes, left=left, color=shade, label=label)
        left += sizes
    axes[2].set_title("Memory between steps, MB")
    axes[2].invert_yaxis()
    axes[2].legend(frameon=False)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Matching names of Python functions to summaries")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> dict[str, dict]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps",
        type=int,
        default=60,
        help="Train for this many steps (default: %(default)s).",
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=32,
        help="Put this many pairs into a batch (default: %(default)s).",
    )
    parser.add_argument(
        "--rank",
        type=int,
        default=8,
        help="Use adapters of this rank (default: %(default)s).",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=1e-3,
        help="Use this learning rate (default: %(default)s).",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="Initialise the adapters and shuffle the data with this seed (default: "
        "%(default)s).",
    )
    parser.add_argument(
        "--held-out",
        type=int,
        default=1000,
        help="Hold out this many pairs for the evaluation (default: %(default)s).",
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
        default=20,
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
        help="Write checkpoints and the plot to this folder (default: "
        "examples/output).",
    )
    options = parser.parse_args(arguments)

    data, held_out = load_data(options.held_out, options.seed)
    print(f"{len(data[0][0])} pairs to train on, {options.held_out} held out")
    model = load_model()
    model = eqx.tree_at(lambda m: m.layers, model, model.layers[: options.layers])
    rows = {}
    for name, format in BASES.items():
        base = model if format is None else eqquant.quantize_tree(model, format)
        before = accuracy(base, held_out)
        row = train(name, base, data, options)
        rows[name] = {
            **row,
            "before": before,
            "after": accuracy(row["model"], held_out),
        }

    print_table(rows)
    merged, report = eqquant.merge_lora(rows["nf4"]["model"], BASES["nf4"])
    errors = [row.sqnr for row in report.rows]
    print(
        f"\nMerged and quantized again: {accuracy(merged, held_out)[0]:.1%}; that adds "
        f"an error {min(errors):.1f} to {max(errors):.1f} dB below the weights"
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"Peak memory of the process: {peak:.0f} MB")
    path = options.output / "qlora_minilm.png"
    plot(rows, path)
    print(f"Plot: {path}")
    return rows


if __name__ == "__main__":
    main()
