"""Quantize the sentence encoder of minilm.py with calibration, and see what it gains.

The calibration data are sentences of the documentation of Python itself, in which a
part of the tokens are replaced by random ones: so they cover the vocabulary. They share
no sentence with those of the evaluation. The table has columns of their own for the
second half of these.

    python examples/calibrate_minilm.py
    python examples/calibrate_minilm.py --sentences 64 --rows nf4 --bits 4.35
"""

import argparse
import ast
import functools as ft
import time
from collections.abc import Iterator

import eqquant
import jax
import minilm
import numpy as np
from _standard_library import modules
from jaxtyping import Bool, Int


LONGEST = 64  # Tokens.
BATCH = 40
RANDOM = 0.5  # Which part of the tokens are replaced.
FIRST_WORD = 1996  # Tokens before it are special ones, or single characters.

NF4 = eqquant.NF4(scale_dtype="bfloat16")
TWICE = eqquant.NF4(double_quantization=True)
FINER = eqquant.NF4(block_size=32, scale_dtype="bfloat16")
# 768 weights, of which NF4 costs more than of any others.
RULES = {"*token_types*": "int8"}
# Tables stand NF4 well, and to watch what is looked up takes as long as all the rest.
NOT_TABLES = {"*embeddings*": None}
ROWS = {
    "int8": (eqquant.Int8(), False, False),
    "int8, GPTQ": (eqquant.Int8(), True, False),
    "nf4": (NF4, False, False),
    "nf4, rotated": (NF4, False, True),
    "nf4, GPTQ": (NF4, True, False),
    "nf4, GPTQ, rotated": (NF4, True, True),
}


#
# The data
#


def documentation() -> Iterator[str]:
    """The first paragraph of each docstring, where it is a sentence or a few."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    for _, tree in modules():
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if not text or ">>>" in text.split("\n\n")[0]:
                continue
            text = " ".join(text.split("\n\n")[0].split())
            if 40 <= len(text) <= 300 and text.endswith("."):
                yield text


Batch = tuple[Int[np.ndarray, "batch length"], Bool[np.ndarray, "batch length"]]


def calibration_batches(count: int) -> list[Batch]:
    """Tokens and masks of so many sentences, those of about a length together."""
    texts = sorted(set(documentation()) - set(minilm.read_sentences()))
    rng = np.random.default_rng(0)
    texts = [texts[i] for i in rng.permutation(len(texts))[:count]]
    tokens, mask = (x[:, :LONGEST] for x in minilm.tokenize(texts))
    replaced = (rng.random(tokens.shape) < RANDOM) & mask
    replaced[:, 0] = False  # What every sentence begins with.
    vocabulary = 30522
    words = rng.integers(FIRST_WORD, vocabulary, tokens.shape, np.int32)
    tokens = np.where(replaced, words, tokens)
    order = np.argsort(mask.sum(1), kind="stable")
    batches = []
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        # Few different lengths: each is compiled.
        length = LONGEST // 2 if mask[rows].sum(1).max() <= LONGEST // 2 else LONGEST
        batches.append((tokens[rows, :length], mask[rows, :length]))
    return batches


def forward(model, batch: Batch):
    return jax.vmap(model)(*batch)


def within(bits: float, model, stats: eqquant.Statistics):
    """The model in so many bits a weight: its tables first, and what is left of the
    budget shared out among the layers."""
    rules = RULES | {"*embeddings*": TWICE}
    model_with_tables = eqquant.quantize_tree(model, None, rules=rules, rotate=True)
    elements = eqquant.tree_nbytes(model) // 4
    rules = eqquant.allocate(
        model_with_tables,
        int(bits * elements / 8),
        [TWICE, NF4, FINER, eqquant.Int8()],
        stats,
    )
    print(f"\nA budget of {bits} bits a weight:\n{rules}\n")
    return eqquant.quantize_tree(
        model_with_tables, None, rules=rules, calibration=stats, rotate=True
    )


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sentences", type=int, default=240)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--bits", type=float, nargs="*", default=[4.2, 4.35, 5.0])
    options = parser.parse_args()

    model = minilm.load_model()
    sentences = minilm.tokenize(minilm.read_sentences())
    expected = minilm.embed_all(model, *sentences)

    start = time.perf_counter()
    batches = calibration_batches(options.sentences)
    stats = eqquant.calibrate(forward, model, batches, rules=NOT_TABLES)
    jax.block_until_ready(stats)
    print(
        f"calibrated on {options.sentences} sentences in "
        f"{time.perf_counter() - start:.1f} s"
    )

    def quantize(name: str):
        format, calibrated, rotate = ROWS[name]
        known = stats if calibrated else None
        return eqquant.quantize_tree(
            model, format, rules=RULES, calibration=known, rotate=rotate
        )

    makers = {name: ft.partial(quantize, name) for name in options.rows}
    for bits in options.bits:
        name = f"at most {bits} bits, GPTQ, rotated"
        makers[name] = ft.partial(within, bits, model, stats)
    rows = []
    for name, make in makers.items():
        start = time.perf_counter()
        quantized = jax.block_until_ready(make())
        seconds = time.perf_counter() - start
        embeddings = minilm.embed_all(quantized, *sentences)
        row = measure(name, quantized, model, embeddings, expected)
        rows.append(row | {"seconds": seconds})
        print(f"{name}: mean cosine {row['mean']:.4f}", flush=True)
    print()
    minilm.print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
