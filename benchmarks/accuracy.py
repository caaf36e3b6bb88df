"""Compare the accuracy and size of a quantized model with other libraries.

    python benchmarks/accuracy.py
    python benchmarks/accuracy.py --quantizers llama_cpp torchao

The model is the sentence encoder of `examples/minilm.py`. The script installs each
library into a separate environment, which is kept (`--cache`), and lists libraries that
cannot be installed. A library quantizes every weight except one of 768 elements, in
each of its formats. The script then evaluates the model with the dequantized weights,
in the same way for all libraries. Bytes count the whole model.

For each size that another library reaches, eqquant gets a budget of the same number of
bytes, as in `examples/calibrate_minilm.py`. llm-compressor gets the same calibration
data; the other formats use no calibration.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import _quantizers
import eqquant
import jax
import numpy as np
from _environments import CACHE
from _examples import calibrate_minilm, minilm
from _peer_weights import quantized_by, write
from _tables import add_output_options, output, print_table


COLUMNS = {key: calibrate_minilm.COLUMNS[key] for key in ("format", "bytes", "bits")}
COLUMNS |= {"mean": ("mean cosine", "{:.5f}"), "top 10": ("same top 10", "{:.2%}")}


def weights_of(model) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(model)
    named = ((minilm.name_of(path), leaf) for path, leaf in leaves)
    return {
        name: np.asarray(leaf)
        for name, leaf in named
        if getattr(leaf, "ndim", 0) == 2 and "token_type" not in name
    }


def with_weights(model, weights):
    def new(path, leaf):
        name = minilm.name_of(path)
        return jax.numpy.asarray(weights[name]) if name in weights else leaf

    return jax.tree_util.tree_map_with_path(new, model)


def not_ahead(ours: list[dict], others: list[dict]) -> list[str]:
    """List the rows of other libraries that no smaller row of eqquant beats."""
    losses = []
    for other in others:
        small = [row for row in ours if row["bytes"] <= other["bytes"]]
        for key in ("mean", "top 10"):
            best = max((row[key] for row in small), default=-1.0)
            if best <= other[key]:
                title = COLUMNS[key][0]
                losses.append(
                    f"{other['format']}, {title}: {best:.5f}, {other[key]:.5f}"
                )
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = list(_quantizers.find("encoder"))
    parser.add_argument("--quantizers", nargs="*", choices=known, default=known)
    parser.add_argument(
        "--bits",
        type=float,
        nargs="*",
        help="budgets of eqquant in bits per weight (default: the sizes of the others)",
    )
    parser.add_argument(
        "--sentences", type=int, default=480, help="sentences to calibrate on"
    )
    parser.add_argument("--cache", type=pathlib.Path, default=CACHE)
    add_output_options(parser)
    options = parser.parse_args()
    with output(options):
        compare(options)


def compare(options: argparse.Namespace) -> None:

    model = minilm.load_model()
    sentences = minilm.tokenize(minilm.read_sentences())
    expected = minilm.embed_all(model, *sentences)
    weights = weights_of(model)
    rest = eqquant.trees.nbytes(model) - sum(w.nbytes for w in weights.values())

    held_out = minilm.read_sentences()
    count = options.sentences
    batches = calibrate_minilm.calibration_batches(count, minilm.tokenize, held_out)
    ours, others, missing = [], [], []

    def measure(name: str, quantized, nbytes: int | None = None) -> dict:
        embeddings = minilm.embed_all(quantized, *sentences)
        row = minilm.compare(name, quantized, model, embeddings, expected)
        if nbytes is not None:
            row |= {"bytes": nbytes, "bits": row["bits"] * nbytes / row["bytes"]}
        progress = f"{name}: mean cosine {row['mean']:.5f}, {row['top 10']:.2%}"
        print(progress, file=sys.stderr, flush=True)
        return row

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write(folder, weights, batches)
        for name in options.quantizers:
            try:
                results = quantized_by(name, folder, minilm.WEIGHTS, options.cache)
            except (RuntimeError, subprocess.TimeoutExpired) as problem:
                missing.append(f"{name}: {problem}")
                continue
            for result in results:
                title = f"{result['version']}: {result['variant']}"
                if "failed" in result:
                    missing.append(f"{title}: {result['failed']}")
                    continue
                print(f"{result['seconds']:.0f} s", end=" ", file=sys.stderr)
                with np.load(result["file"]) as decoded:
                    new = with_weights(model, decoded)
                others.append(measure(title, new, rest + result["bytes"]))
    size = eqquant.trees.nbytes(model)
    sizes = sorted({row["bytes"] for row in others}, reverse=True)
    if options.bits is not None:
        sizes = [int(bits * size / 32) for bits in options.bits]
    if sizes:
        stats = calibrate_minilm.calibrate(model, options.sentences)
        for quantized, _ in calibrate_minilm.budgets(sizes, model, stats):
            ours.append(measure("eqquant", quantized))

    rows = sorted(ours + others, key=lambda row: -row["bytes"])
    head = [title for title, _ in COLUMNS.values()]
    table = [
        [form.format(row[key]) for key, (_, form) in COLUMNS.items()] for row in rows
    ]
    print_table([head, *table], options.markdown)
    print()
    for line in missing:
        print(f"NOT MEASURED: {line}")
    for line in not_ahead(ours, others):
        print(f"NOT AHEAD of {line}")


if __name__ == "__main__":
    main()
