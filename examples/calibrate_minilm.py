"""Quantize the sentence encoder of minilm.py with calibration, and measure the gain.

The calibration sentences come from the documentation of Python. Random tokens replace
some of their tokens, so that they cover the vocabulary. They share no sentence with the
evaluation. The table has separate columns for the second half of the evaluation.

    python examples/calibrate_minilm.py
    python examples/calibrate_minilm.py --sentences 64 --rows nf4 --bits 4.35
"""

import argparse
import pathlib
import time
from collections.abc import Iterator

import eqquant
import jax
import matplotlib.pyplot as plt
import minilm
import numpy as np
from _calibration_data import Batch, calibration_batches


NF4 = eqquant.NF4(scale_dtype="bfloat16")
# Formats that a byte budget may use. 192 divides the rows of all weights.
SHORT = {"block_size": 32, "scale_dtype": "bfloat16"}
TRELLIS = [eqquant.formats.Trellis(bits=bits, block_size=192) for bits in (2, 3, 4)]
FORMATS = [
    *TRELLIS,
    eqquant.formats.Int5(**SHORT),
    eqquant.formats.Int6(**SHORT),
    eqquant.Int8(),
    eqquant.Int8(**SHORT),
]
BITS = [8.2, 5.5, 4.35, 3.85, 3.4, 2.6]
# 768 weights that are added to every token, so that their errors matter most.
RULES = {"*token_types*": FORMATS[-1]}
ROWS = {
    "int8": (eqquant.Int8(), False, False),
    "int8, GPTQ": (eqquant.Int8(), True, False),
    "nf4": (NF4, False, False),
    "nf4, rotated": (NF4, False, True),
    "nf4, GPTQ": (NF4, True, False),
    "nf4, GPTQ, rotated": (NF4, True, True),
    **{f"trellis{x.bits}, GPTQ, rotated": (x, True, True) for x in TRELLIS[::-1]},
}


#
# Calibration
#


def forward(model, batch: Batch):
    return jax.vmap(model)(*batch)


def calibrate(model, sentences: int) -> eqquant.calibration.Statistics:
    batches = calibration_batches(sentences, minilm.tokenize, minilm.read_sentences())
    rules = dict.fromkeys(RULES)  # They have a fixed format.
    return eqquant.calibrate(forward, model, batches, rules=rules)


def budgets(
    sizes: list[int], model, stats: eqquant.calibration.Statistics
) -> Iterator[tuple[minilm.SentenceEncoder, eqquant.calibration.Allocation]]:
    """Yield, for each byte budget, the model and the format of each weight."""
    size = eqquant.trees.nbytes(model)
    model = eqquant.quantize_tree(model, None, rules=RULES)
    # The error of each format on each weight is measured once.
    whole = eqquant.allocate(model, size, FORMATS, stats, rotate=True)
    for most in sizes:
        allocation = whole.within(most)
        quantized = eqquant.quantize_tree(
            model, None, rules=allocation, calibration=stats, rotate=True
        )
        yield quantized, allocation


#
# The measurements
#


def measure(name: str, quantized, model, embeddings, expected) -> dict:
    row = minilm.compare(name, quantized, model, embeddings, expected)
    half = len(expected) // 2
    nearest = [minilm.neighbours(x, 10)[half:] for x in (expected, embeddings)]
    row["held back"] = minilm.cosines(embeddings[half:], expected[half:]).mean()
    row["top 10, held back"] = minilm.agreement(*nearest)
    return row


COLUMNS = {
    "format": ("", "{}"),
    "bytes": ("bytes", "{:,}"),
    "bits": ("bits/weight", "{:.2f}"),
    "mean": ("mean cosine", "{:.4f}"),
    "held back": ("held back", "{:.4f}"),
    "top 10": ("same top 10", "{:.1%}"),
    "top 10, held back": ("held back", "{:.1%}"),
    "seconds": ("seconds", "{:.1f}"),
}


def plot(
    rows: list[dict], allocation: eqquant.calibration.Allocation, path: pathlib.Path
) -> None:
    """Plot error against size for `rows`, and the frontier of the last allocation."""
    figure, (left, right) = plt.subplots(2, 1, figsize=(5.6, 8), layout="constrained")
    for kind, marker in ((False, "o"), (True, "s")):
        some = [row for row in rows if ("at most" in row["format"]) == kind]
        x, y = ([row[key] for row in some] for key in ("bits", "mean"))
        left.plot(x, 1 - np.array(y), marker if not kind else "-" + marker)
        for row in some:
            at = row["bits"], 1 - row["mean"]
            left.annotate(row["format"], at, xytext=(5, 3), textcoords="offset points")
    left.set(xlabel="bits per weight", ylabel="1 - mean cosine", yscale="log")
    left.margins(0.3, 0.2)
    allocation.plot(right)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=f"Rows: {'; '.join(ROWS)}.",
    )
    parser.add_argument(
        "--sentences",
        type=int,
        default=480,
        help="Calibrate on this many sentences (default: %(default)s).",
    )
    parser.add_argument(
        "--rows",
        nargs="*",
        choices=ROWS,
        metavar="ROW",
        default=list(ROWS),
        help="Measure these formats and methods. The default is all of them.",
    )
    parser.add_argument(
        "--bits",
        type=float,
        nargs="*",
        default=BITS,
        help="Allocate these budgets, in bits per weight. The default is all of them.",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=minilm.HERE / "output",
        help="Write the plot to this folder (default: examples/output).",
    )
    options = parser.parse_args()

    model = minilm.load_model()
    sentences = minilm.tokenize(minilm.read_sentences())
    expected = minilm.embed_all(model, *sentences)

    start = time.perf_counter()
    stats = calibrate(model, options.sentences)
    print(
        f"calibrated on {options.sentences} sentences in "
        f"{time.perf_counter() - start:.1f} s",
        flush=True,
    )

    # Without a budget, tables are rounded to nearest.
    layers = {p: known for p, known in stats.weights.items() if "embeddings" not in p}
    rows, allocation = [], None

    def add(name: str, quantized, seconds: float) -> None:
        embeddings = minilm.embed_all(quantized, *sentences)
        row = measure(name, quantized, model, embeddings, expected)
        rows.append(row | {"seconds": seconds})
        print(f"{name}: mean cosine {row['mean']:.4f}", flush=True)

    for name in options.rows:
        format, calibrated, rotate = ROWS[name]
        start = time.perf_counter()
        quantized = eqquant.quantize_tree(
            model,
            format,
            rules=RULES,
            calibration=eqquant.calibration.Statistics(layers) if calibrated else None,
            rotate=rotate,
        )
        jax.block_until_ready(quantized)
        add(name, quantized, time.perf_counter() - start)
    start = time.perf_counter()
    size = eqquant.trees.nbytes(model)
    sizes = [int(bits * size / 32) for bits in options.bits]
    of_budgets = budgets(sizes, model, stats)
    for bits, (quantized, allocation) in zip(options.bits, of_budgets, strict=True):
        jax.block_until_ready(quantized)
        seconds = time.perf_counter() - start
        print(f"\nA budget of {bits} bits a weight:\n{allocation}\n")
        add(f"at most {bits} bits", quantized, seconds)
        start = time.perf_counter()
    print()
    minilm.print_table(rows, COLUMNS)
    if allocation is not None:
        path = options.output / "calibrate_minilm.png"
        plot(rows, allocation, path)
        print(f"\nPlot: {path}")


if __name__ == "__main__":
    main()
