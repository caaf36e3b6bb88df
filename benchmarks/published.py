"""Repeat two published comparisons at small scale: 4-bit formats, and GPTQ.

    python benchmarks/published.py

QLoRA (arXiv 2305.14314, table 2) compares 4-bit formats by the mean perplexity of
language models with 125 million to 13 billion weights. The first table compares the
same formats by the SQNR of normally distributed weights and by the outputs of the
sentence encoder of `examples/minilm.py`. It also lists the perplexities of the paper.

GPTQ (arXiv 2210.17323) minimizes the squared error of a layer's outputs on calibration
data. The paper compares it with rounding to nearest (RTN) at 4 and 3 bits with per-row
scales. The second table contains these squared errors, relative to the outputs, for
matmuls of the encoder.
"""

import argparse

import eqquant
import jax
import numpy as np
from _examples import calibrate_minilm, minilm
from _tables import add_output_options, output, print_table


def with_negatives(levels) -> tuple[float, ...]:
    return tuple(sorted({sign * level for level in levels for sign in (-1.0, 1.0)}))


# Formats and the perplexities of the paper, which has none for NF4 without double
# quantization. As in the paper, blocks have 64 elements and absmax scales.
FORMATS = {
    "Int4": (eqquant.formats.Codebook(range(-7, 8)), 34.34),
    "Float4 (E2M1)": (
        eqquant.formats.Codebook(with_negatives([0, 0.5, 1, 1.5, 2, 3, 4, 6])),
        31.07,
    ),
    "Float4 (E3M0)": (
        eqquant.formats.Codebook(with_negatives([0, *(2.0**i for i in range(-3, 4))])),
        29.48,
    ),
    "NF4": (eqquant.NF4(), None),
    "NF4 + DQ": (eqquant.NF4(double_quantization=True), 27.41),
}
INTEGERS = {
    "4 bits": eqquant.Int4(block_size=None),
    "3 bits": eqquant.Int3(block_size=None, fit="absmax"),
    "4 bits, block size 64": eqquant.Int4(block_size=64),
    "3 bits, block size 64": eqquant.Int3(),
}


def decibels(error, signal) -> float:
    return float(10 * np.log10(np.sum(signal**2) / np.sum(error**2)))


def compare_formats(model, markdown: bool) -> None:
    sentences = minilm.tokenize(minilm.read_sentences())
    expected = minilm.embed_all(model, *sentences)
    weight = jax.random.normal(jax.random.key(0), (1024, 1024))
    table = [["format", "SQNR, dB", "mean cosine", "perplexity in the paper"]]
    for name, (format, perplexity) in FORMATS.items():
        rounded = eqquant.quantize(weight, format).dequantize()
        sqnr = decibels(rounded - weight, weight)
        quantized = eqquant.quantize_tree(model, format)
        embeddings = minilm.embed_all(quantized, *sentences)
        cosine = minilm.cosines(embeddings, expected).mean()
        paper = "" if perplexity is None else f"{perplexity:.2f}"
        table.append([name, f"{sqnr:.2f}", f"{cosine:.4f}", paper])
    print_table(table, markdown)


def compare_rounding(model, paths: list[str], sentences: int, markdown: bool) -> None:
    rules = {path: "nf4" for path in paths} | {"*": None}
    held_out = minilm.read_sentences()
    batches = calibrate_minilm.calibration_batches(sentences, minilm.tokenize, held_out)
    stats = eqquant.calibrate(calibrate_minilm.forward, model, batches, rules=rules)
    table = [["weight", "format", "RTN", "GPTQ", "ratio"]]
    for path in paths:
        for name, format in INTEGERS.items():
            quantized = eqquant.quantize_tree(
                model, None, rules={path: format}, calibration=stats
            )
            report = eqquant.report(quantized, model, calibration=stats)
            (row,) = (row for row in report.rows if row.path == path)
            nearest, gptq = row.rounded_output_error**2, row.output_error**2
            numbers = f"{nearest:.5f}", f"{gptq:.5f}", f"{gptq / nearest:.2f}"
            table.append([path, name, *numbers])
    print()
    print_table(table, markdown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    paths = ["layers.2.attention.query_proj.weight", "layers.2.up.weight"]
    parser.add_argument("--paths", nargs="+", default=paths)
    parser.add_argument(
        "--sentences", type=int, default=80, help="sentences to calibrate on"
    )
    add_output_options(parser)
    options = parser.parse_args()
    model = minilm.load_model()
    with output(options):
        compare_formats(model, options.markdown)
        compare_rounding(model, options.paths, options.sentences, options.markdown)


if __name__ == "__main__":
    main()
