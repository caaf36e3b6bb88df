"""Two published comparisons at small scale: 4-bit formats, and GPTQ beside rounding.

    python benchmarks/published.py

QLoRA (arXiv 2305.14314, table 2) compares 4-bit formats by the mean perplexity of
language models of 125 million to 13 billion weights. Here it is by the signal-to-noise
ratio of normal weights, and by the results of the sentence encoder of
`examples/minilm.py`; the perplexities of the paper are beside these.

GPTQ (arXiv 2210.17323) minimises the squared error of the products of a layer with the
calibration data, for which it is compared with rounding to nearest at 4 and 3 bits, one
grid for each row. Here are these errors, relative to the products, for the products of
that encoder.
"""

import argparse

import eqquant
import jax
import numpy as np
from _examples import calibrate_minilm, minilm


def both_signs(levels) -> tuple[float, ...]:
    return tuple(sorted({sign * level for level in levels for sign in (-1.0, 1.0)}))


# With the perplexities of the paper, which has none of NF4 alone. All have blocks of 64
# and the largest magnitude as the scale, as there.
FORMATS = {
    "Int4": (eqquant.formats.Codebook(range(-7, 8)), 34.34),
    "Float4 (E2M1)": (
        eqquant.formats.Codebook(both_signs([0, 0.5, 1, 1.5, 2, 3, 4, 6])),
        31.07,
    ),
    "Float4 (E3M0)": (
        eqquant.formats.Codebook(both_signs([0, *(2.0**i for i in range(-3, 4))])),
        29.48,
    ),
    "NF4": (eqquant.NF4(), None),
    "NF4 + DQ": (eqquant.NF4(double_quantization=True), 27.41),
}
INTEGERS = {
    "4 bits": eqquant.Int4(block_size=None),
    "3 bits": eqquant.Int3(block_size=None, fit="absmax"),
    "4 bits, blocks of 64": eqquant.Int4(block_size=64),
    "3 bits, blocks of 64": eqquant.Int3(),
}


def decibels(error, signal) -> float:
    return float(10 * np.log10(np.sum(signal**2) / np.sum(error**2)))


def compare_formats(model) -> None:
    sentences = minilm.tokenize(minilm.read_sentences())
    expected = minilm.embed_all(model, *sentences)
    weight = jax.random.normal(jax.random.key(0), (1024, 1024))
    print(f"{'':<16}{'SQNR, dB':>12}{'mean cosine':>14}{'paper':>10}")
    for name, (format, perplexity) in FORMATS.items():
        rounded = eqquant.quantize(weight, format).dequantize()
        sqnr = decibels(rounded - weight, weight)
        quantized = eqquant.quantize_tree(model, format)
        embeddings = minilm.embed_all(quantized, *sentences)
        cosine = minilm.cosines(embeddings, expected).mean()
        paper = "" if perplexity is None else f"{perplexity:.2f}"
        print(f"{name:<16}{sqnr:>12.2f}{cosine:>14.4f}{paper:>10}", flush=True)


def compare_rounding(model, paths: list[str], sentences: int) -> None:
    rules = {path: "nf4" for path in paths} | {"*": None}
    but = minilm.read_sentences()
    batches = calibrate_minilm.calibration_batches(sentences, minilm.tokenize, but)
    stats = eqquant.calibrate(calibrate_minilm.forward, model, batches, rules=rules)
    print(f"\n{'':<60}{'nearest':>10}{'GPTQ':>10}{'ratio':>8}")
    for path in paths:
        for name, format in INTEGERS.items():
            quantized = eqquant.quantize_tree(
                model, None, rules={path: format}, calibration=stats
            )
            report = eqquant.report(quantized, model, calibration=stats)
            (row,) = (row for row in report.rows if row.path == path)
            nearest, gptq = row.rounded_output_error**2, row.output_error**2
            numbers = f"{nearest:>10.5f}{gptq:>10.5f}{gptq / nearest:>8.2f}"
            print(f"{path + ', ' + name:<60}{numbers}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    paths = ["layers.2.attention.query_proj.weight", "layers.2.up.weight"]
    parser.add_argument("--paths", nargs="+", default=paths)
    parser.add_argument("--sentences", type=int, default=80)
    options = parser.parse_args()
    model = minilm.load_model()
    compare_formats(model)
    compare_rounding(model, options.paths, options.sentences)


if __name__ == "__main__":
    main()
