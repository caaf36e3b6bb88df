"""Train a network with quantized weights, and compare with post-training quantization.

A small convolutional network classifies scikit-learn's 1,797 images of digits. Each
seed trains it in floating point, quantizes the result (PTQ), and continues the
training with quantized weights (QAT). A float model is trained for the same number of
steps. Accuracies are on held-out images.

    python examples/qat_digits.py
    python examples/qat_digits.py --formats ternary --seeds 0 --epochs 10

An interrupted run resumes.
"""

import argparse
import functools as ft
import pathlib

import _checkpoint
import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from sklearn.datasets import load_digits
from tqdm import tqdm


matplotlib.use("Agg")
import matplotlib.pyplot as plt


HERE = pathlib.Path(__file__).parent
BATCH = 64
SAVE_EVERY = 10  # Epochs.
FORMATS = ("int8", "nf4", "ternary", "binary")


class Network(eqx.Module):
    """Three convolutions, each of which halves the image, and a linear layer."""

    convolutions: list[eqx.nn.Conv2d]
    head: eqx.nn.Linear

    def __init__(self, *, key):
        a, b, c, d = jax.random.split(key, 4)
        self.convolutions = [
            eqx.nn.Conv2d(1, 16, 3, padding=1, key=a),
            eqx.nn.Conv2d(16, 32, 3, stride=2, padding=1, key=b),
            eqx.nn.Conv2d(32, 32, 3, stride=2, padding=1, key=c),
        ]
        self.head = eqx.nn.Linear(128, 10, key=d)

    def __call__(self, image: Float[Array, "1 8 8"]) -> Float[Array, " 10"]:
        x = image
        for convolution in self.convolutions:
            x = jax.nn.relu(convolution(x))
        return self.head(x.reshape(-1))


def load(seed: int):
    """Return images and labels: three quarters for training, one quarter for
    testing."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images = jnp.asarray(digits.images[order, None] / 16 - 0.3, jnp.float32)
    labels = jnp.asarray(digits.target[order])
    split = len(order) * 3 // 4
    return (images[:split], labels[:split]), (images[split:], labels[split:])


def loss(model, images, labels) -> Float[Array, ""]:
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@eqx.filter_jit
def predict(model, images: Float[Array, "n 1 8 8"]) -> Int[Array, " n"]:
    # Straight-through convolutions need `quaxify`; for other models it is a no-op.
    return jnp.argmax(eqquant.quaxify(jax.vmap(model))(images), -1)


def accuracy(model, images, labels) -> float:
    """Return the accuracy in percent."""
    return float(100 * jnp.mean(predict(model, images) == labels))


def adam(rate: float, steps: int) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(rate, steps))


@eqx.filter_jit
def step(model, state, images, labels, *schedule):
    gradients = eqx.filter_grad(loss)(model, images, labels)
    updates, state = adam(*schedule).update(gradients, state)
    return eqx.apply_updates(model, updates), state


def train(model, images, labels, *, epochs, rate, seed, path, label):
    """Return the trained model. The arrays of `model` are trained, quantized or not."""
    steps = len(labels) // BATCH
    schedule = rate, epochs * steps
    state = adam(*schedule).init(eqx.filter(model, eqx.is_inexact_array))
    configuration = {"epochs": epochs, "rate": rate, "seed": seed, "label": label}
    restore = ft.partial(_checkpoint.restore, path, **configuration)
    model, state, done = restore((model, state, 0))
    progress = tqdm(range(done, epochs), desc=label, initial=done, total=epochs)
    for epoch in progress:
        rng = np.random.default_rng((seed, epoch))
        order = rng.permutation(len(labels))
        for batch in order[: steps * BATCH].reshape(steps, BATCH):
            model, state = step(model, state, images[batch], labels[batch], *schedule)
        if (epoch + 1) % SAVE_EVERY == 0 or epoch + 1 == epochs:
            _checkpoint.save(path, (model, state, epoch + 1), **configuration)
    return model


def measure(seed: int, formats, epochs: int, folder: pathlib.Path) -> dict:
    """Return accuracy and bytes for each (format, method)."""
    data, test = load(seed)
    model = Network(key=jax.random.key(seed))
    run = ft.partial(train, epochs=epochs, seed=seed)
    name = lambda what: {"path": folder / f"{what}-{seed}.eqx", "label": what}
    model = run(model, *data, rate=2e-3, **name("float"))
    longer = run(model, *data, rate=1e-3, **name("float-longer"))
    size = eqquant.trees.nbytes(model)
    rows = {
        ("float", ""): (accuracy(model, *test), size),
        ("float", "longer"): (accuracy(longer, *test), size),
    }
    for format in formats:
        after = eqquant.quantize_tree(model, format)
        wrapped = eqquant.FakeQuantized(model, format, clip=True)
        trained = run(wrapped, *data, rate=1e-3, **name(format)).quantized()
        for how, quantized in (("PTQ", after), ("QAT", trained)):
            size = eqquant.trees.nbytes(quantized)
            rows[format, how] = (accuracy(quantized, *test), size)
    return rows


def float_accuracy(results: list[dict]) -> float:
    """Return the baseline accuracy: the better of the two float models."""
    return max(
        np.mean([rows["float", how][0] for rows in results]) for how in ("", "longer")
    )


def print_table(results: list[dict]) -> None:
    print(f"\n{'':16}   bytes  accuracy, %   to float   of each seed")
    reference = float_accuracy(results)
    for format, how in results[0]:
        values = [rows[format, how][0] for rows in results]
        size = results[0][format, how][1]
        each = "  ".join(f"{value:.2f}" for value in values)
        print(
            f"{format:9}{how:7} {size:7,} {np.mean(values):11.2f}"
            f" {np.mean(values) - reference:+11.2f}   {each}"
        )


def plot(results: list[dict], path: pathlib.Path) -> None:
    formats = list(dict.fromkeys(f for f, how in results[0] if how == "QAT"))
    figure, axis = plt.subplots(figsize=(5.6, 3.6), layout="constrained")
    bottom = min(value for rows in results for value, _ in rows.values()) - 3
    for offset, how, colour in ((-0.2, "PTQ", "tab:gray"), (0.2, "QAT", "tab:green")):
        values = np.array([[rows[f, how][0] for f in formats] for rows in results])
        where = np.arange(len(formats)) + offset
        axis.bar(where, values.mean(0), 0.38, color=colour, label=how)
        for x, value in zip(where, values.mean(0), strict=True):
            axis.text(x, bottom + 0.4, f"{value:.2f}", ha="center", color="white")
        for row in values:
            axis.plot(where, row, "k.", markersize=4)
    level = float_accuracy(results)
    label = f"float: {level:.2f}"
    axis.axhline(level, color="k", linewidth=0.8, linestyle="--", label=label)
    axis.set(xticks=np.arange(len(formats)), xticklabels=formats)
    axis.set_ylim(bottom, 100)
    axis.set_ylabel("Accuracy on held-out digits, %")
    axis.set_title("After training (PTQ), and trained with quantization (QAT)")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=FORMATS,
        default=list(FORMATS),
        help="Train with weights in these formats. The default is all of them.",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        help="Repeat the experiment with these seeds (default: 0 1 2).",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=30,
        help="Train for this many epochs (default: %(default)s).",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=HERE / "output",
        help="Write checkpoints and the plot to this folder (default: "
        "examples/output).",
    )
    options = parser.parse_args()
    folder = options.output / "qat_digits"
    results = [
        measure(seed, options.formats, options.epochs, folder) for seed in options.seeds
    ]
    print_table(results)
    path = options.output / "qat_digits.png"
    plot(results, path)
    print(f"\nPlot: {path}")


if __name__ == "__main__":
    main()
