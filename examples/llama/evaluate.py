"""Measure the effect of quantization on a model from a folder or a GGUF file.

For each format, the example prints bytes, bits per character of held-out text, tokens
per second, and a sample.

    python examples/llama/evaluate.py examples/output/small
    python examples/llama/evaluate.py examples/output/small --formats nf4 "2.6 bits"

The text is the part of Python's documentation that `train_small.py` holds out. A row
that is named by a number of bits allocates a budget with that many bits per weight. Its
weights are rotated, and rounded by GPTQ with the training part of the documentation.
For a GGUF file, the row `as in the file` has its own formats; all other rows quantize
its decoded weights.
"""

import argparse
import functools as ft
import math
import pathlib
from collections.abc import Callable, Iterator

import eqquant
import equinox as eqx
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from comparison import sample
from documentation import read_documents
from load import load_in, load_model, Model, open_model
from model import Decoder
from packing import batch_at, losses, pack, Rows
from sampling import Sampling
from text import Text


matplotlib.use("Agg")

FORMATS = {
    "float32": None,
    "bfloat16": None,
    **{name: name for name in ("int8", "fp8", "nf4", "mxfp4", "int4")},
    "nf4 twice quantized": eqquant.NF4(double_quantization=True),
    **{name: name for name in ("nf3", "nf2")},
    "ternary": eqquant.Ternary(block_size=32),
}
AS_IT_IS = "as in the file"
BITS = {f"{bits} bits": bits for bits in (4.3, 3.4, 2.6)}
# Formats that a budget may use.
CHOICE = [
    eqquant.Int8(),
    *(
        kind(block_size=n, double_quantization=True)
        for kind in (eqquant.NF4, eqquant.NF3, eqquant.NF2)
        for n in (32, 64)
    ),
]
BATCH = 8
OUTPUT = pathlib.Path(__file__).parents[1] / "output"


def quantized(
    names: list[str], source: Model, batches: Callable[[], list[Rows]]
) -> Iterator[tuple[str, Decoder]]:
    """Yield the model in each format. Calibration batches are made on demand."""

    @ft.cache
    def whole() -> tuple[
        Decoder, eqquant.calibration.Statistics, eqquant.calibration.Allocation
    ]:
        # Apart, so that each layer can have its own formats.
        model = load_model(source, decode="all", stacked=False, progress=False)
        loss = lambda model, batch: losses(model, batch)[0]
        stats = eqquant.calibrate(loss, model, batches())
        size = eqquant.trees.nbytes(model)
        return model, stats, eqquant.allocate(model, size, CHOICE, stats, rotate=True)

    for name in names:
        if name in FORMATS:
            dtype = jnp.bfloat16 if name == "bfloat16" else jnp.float32
            kwargs = {"dtype": dtype, "decode": "all", "progress": False}
            yield name, load_model(source, FORMATS[name], **kwargs)
        elif name == AS_IT_IS:
            yield name, load_in(source, None, FORMATS, progress=False)
        else:
            model, stats, allocation = whole()
            rules = allocation.within(
                int(eqquant.trees.nbytes(model) * BITS[name] / 32)
            )
            kwargs = {"calibration": stats, "rotate": True}
            yield name, eqquant.quantize_tree(model, None, rules=rules, **kwargs)


def bits(model, rows: Rows) -> float:
    """Return the cross entropy of all rows under the model, in bits."""
    step = eqx.filter_jit(eqquant.quaxify(losses, on_materialise="error"))
    pad = -len(rows.tokens) % BATCH
    wide = ((0, pad), (0, 0))
    rows = Rows(
        np.pad(rows.tokens, wide), np.pad(rows.segments, wide, constant_values=-1)
    )
    total = 0.0
    for i in range(0, len(rows.tokens), BATCH):
        batch = rows.take(slice(i, i + BATCH))
        total += float(step(model, Rows(*map(jnp.asarray, batch)))[0])
    return total / math.log(2)


def write(model, text: Text, prompt: str, tokens: int) -> tuple[str, float]:
    """Return a sample and the tokens per second."""
    ids = text.encode(prompt)
    sampling = Sampling(temperature=0.7, top_p=0.9)
    written, speed = sample(model, text, ids, tokens, sampling)
    return text.tokenizer.decode(ids + written), speed


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", type=pathlib.Path, help="Read a Hugging Face folder, or a GGUF file."
    )
    names = [*FORMATS, *BITS]
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=[AS_IT_IS, *names],
        help="Measure these formats and budgets. The default is all of them.",
    )
    parser.add_argument(
        "--length",
        type=int,
        default=256,
        help="Use this many tokens of context (default: %(default)s).",
    )
    parser.add_argument(
        "--rows",
        type=int,
        help="Evaluate this many rows of the text. The default is all of them.",
    )
    parser.add_argument(
        "--prompt",
        default="class pathlib.Path\n",
        help="Begin the sample with this text (default: %(default)s).",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=100,
        help="Generate this many tokens for the sample (default: %(default)s).",
    )
    parser.add_argument(
        "--batches",
        type=int,
        default=32,
        help="Calibrate on this many batches (default: %(default)s).",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=OUTPUT,
        help="Write the plot to this folder (default: examples/output).",
    )
    options = parser.parse_args(arguments)
    if options.tokens < 2:
        parser.error(f"--tokens must be 2 or more, got {options.tokens}")

    source = open_model(options.model)
    names = options.formats or [*([AS_IT_IS] if source.types else []), *names]
    text = Text(source)
    training, held_out = read_documents()
    rows = pack([text.encode_document(x) for x in held_out], options.length)
    rows = rows.take(slice(options.rows))
    known = rows.segments >= 0
    characters = len(text.tokenizer.decode(rows.tokens[:, 1:][known[:, 1:]].tolist()))
    print(f"Held out: {characters:,} characters in {len(rows.tokens)} rows")

    def batches() -> list[Rows]:
        seen = pack([text.encode_document(x) for x in training], options.length)
        some = (batch_at(seen, i, BATCH, seed=0) for i in range(options.batches))
        return [Rows(*map(jnp.asarray, batch)) for batch in some]

    table = []
    for name, model in quantized(names, source, batches):
        written, speed = write(model, text, options.prompt, options.tokens)
        row = {
            "format": name,
            "bytes": eqquant.trees.nbytes(model),
            "bits": bits(model, rows) / characters,
            "speed": speed,
            "sample": written,
        }
        table.append(row)
        print(f"{name}: {row['bits']:.4f} bits per character", flush=True)

    print(f"\n{'format':20} {'bytes':>12} {'bits/character':>15} {'tokens/s':>9}")
    for row in table:
        print(
            f"{row['format']:20} {row['bytes']:12,} {row['bits']:15.4f} "
            f"{row['speed']:9.1f}"
        )
    for row in table:
        print(f"\n--- {row['format']}\n{row['sample']}")
    path = options.output / "evaluate.png"
    plot(table, path)
    print(f"\nPlot: {path}")
    return table


def plot(table: list[dict], path: pathlib.Path) -> None:
    """Plot the additional bits per character, relative to the float model, against
    bytes."""
    floats = [row["bits"] for row in table if row["format"] == "float32"]
    table = [row for row in table if "float" not in row["format"]]
    figure, axis = plt.subplots(figsize=(5.6, 4.4), layout="constrained")
    place = lambda row: (row["bytes"] / 1e6, row["bits"] - (floats or [0])[0])
    for marker, is_budget in (("o", False), ("s-", True)):
        some = [place(row) for row in table if (row["format"] in BITS) == is_budget]
        axis.plot(*zip(*some, strict=True) if some else ([], []), marker)
    # Labels alternate between sides of their points.
    for i, row in enumerate(sorted(table, key=place)):
        at, side = ((5, 4), "left") if i % 2 else ((-5, -4), "right")
        if row["format"] in BITS:
            at, side = (0, -11 if i % 2 else 11), "center"
        axis.annotate(
            row["format"],
            place(row),
            at,
            textcoords="offset points",
            ha=side,
            va="center",
        )
    axis.set_yscale("symlog", linthresh=1e-3)
    what = "more bits per character than float32" if floats else "bits per character"
    axis.set(xlabel="MB of weights", ylabel=what)
    axis.margins(0.12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
