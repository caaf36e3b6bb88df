"""Measure how quantization changes the predictions of a language model.

    python benchmarks/language_accuracy.py MODEL.gguf CALIBRATION.txt HELD_OUT.txt

For each row, the script prints the bits per weight of the whole model, the
Kullback-Leibler divergence of the predictions from the float model (KL, in nats: the
mean and the 99% quantile over tokens), the perplexity, and the share of tokens with the
same most probable next token. The float model has the decoded weights of the file. The
embedding is in INT8 in all rows.

"calibrated" means GPTQ with statistics of the first text, and rotation; "not rotated"
means GPTQ only. The second text must be another one.
"""

import argparse
import importlib
import math
import pathlib
import re
import sys
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _tables import add_output_options, format_row, output, print_head


sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples" / "llama"))
load = importlib.import_module("load")
Text = importlib.import_module("text").Text


class Row(NamedTuple):
    """The format of the matrices, and options of `quantize_tree`."""

    format: eqquant.formats.Format | str | None
    is_calibrated: bool = False
    options: Mapping[str, Any] = types.MappingProxyType({})


_rotated = {"rotate": True}
_nf4 = eqquant.NF4(scale_dtype="bfloat16", fit="search")
ROWS = {
    "float": Row(None),
    "int8": Row("int8"),
    "nf4": Row(_nf4),
    "nf4, calibrated": Row(_nf4, True, _rotated),
    "nf4, calibrated, search 8": Row(_nf4, True, _rotated | {"search": 8}),
    "nvfp4": Row("nvfp4"),
    "nvfp4, calibrated": Row("nvfp4", True, _rotated),
    "nvfp4, not rotated": Row("nvfp4", True),
    "nf3, calibrated": Row("nf3", True, _rotated),
    "nf3, calibrated, search 8": Row("nf3", True, _rotated | {"search": 8}),
    "nf2, calibrated": Row("nf2", True, _rotated),
}
HEAD = ("weights", "bits", "KL mean", "KL 99%", "perplexity", "same top token")
WIDTHS = (26, 6, 9, 9, 12, 15)
LENGTH = 512


def forward(model, tokens):
    return model(tokens)


@eqx.filter_jit
def log_probabilities(model, tokens):
    logits = eqquant.quaxify(forward, on_materialise="error")(model, tokens)
    return jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))


def calibration(model, tokens: np.ndarray) -> eqquant.calibration.Statistics:
    """Return statistics of the products of all layers, for rows without padding."""
    return eqquant.calibrate(
        forward,
        model,
        np.array_split(tokens, math.ceil(len(tokens) / 4)),
        rules={"embedding.*": None},
        every_row=True,
        gradients_every=None,
    )


def measured(model, tokens: np.ndarray, expected: list) -> tuple[str, ...]:
    """Compare a model with the log probabilities of the float model."""
    divergences, losses, same = [], [], []
    for row, reference in zip(tokens, expected, strict=True):
        got = np.asarray(log_probabilities(model, row[None]))[0]
        reference = reference.astype(np.float32)
        divergences.append(np.sum(np.exp(reference) * (reference - got), -1))
        losses.append(-got[np.arange(len(got)), row[1:]])
        same.append(got.argmax(-1) == reference.argmax(-1))
    leaves = jax.tree.leaves(model, is_leaf=eqquant.arrays.is_implicit)
    elements = sum(leaf.size for leaf in leaves if hasattr(leaf, "size"))
    return (
        f"{8 * eqquant.trees.nbytes(model) / elements:.2f}",
        f"{np.mean(divergences):.4f}",
        f"{np.quantile(divergences, 0.99):.3f}",
        f"{np.exp(np.mean(losses)):.2f}",
        f"{np.mean(same):.1%}",
    )


def rows_of(
    model, names: list[str], tokens: np.ndarray, held_out: np.ndarray
) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each row. `tokens` and `held_out` are `(rows, length)`."""
    expected = [np.asarray(log_probabilities(model, row[None]))[0] for row in held_out]
    stats = None
    if any(ROWS[name].is_calibrated for name in names):
        begin = time.process_time()
        stats = calibration(model, tokens)
        print(f"statistics: {time.process_time() - begin:.0f} s CPU", file=sys.stderr)
    for name in names:
        row, quantized = ROWS[name], model
        begin = time.process_time()
        if row.format is not None:
            quantized = eqquant.quantize_tree(
                model,
                row.format,
                rules={"embedding.*": "int8"},
                calibration=stats if row.is_calibrated else None,
                **row.options,
            )
        print(f"{name}: {time.process_time() - begin:.0f} s CPU", file=sys.stderr)
        yield name, *measured(quantized, held_out, expected)


def tokens_of(text: Any, path: pathlib.Path, skip: int, count: int) -> np.ndarray:
    """Return `(rows, LENGTH)` tokens of a file, with runs of spaces joined."""
    characters = path.read_text(errors="replace")[skip : skip + 20 * count]
    ids = text.encode(re.sub(r"[ \t]+", " ", characters))
    if len(ids) < count:
        raise ValueError(f"{path}: {len(ids)} tokens after {skip}, but needs {count}.")
    return np.array(ids[:count], np.int32).reshape(-1, LENGTH)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path, help="a GGUF file or a folder")
    parser.add_argument("calibration", type=pathlib.Path, help="a text file")
    parser.add_argument("held_out", type=pathlib.Path, help="another text file")
    parser.add_argument(
        "--rows", type=int, default=8, help="evaluate this many rows of 512 tokens"
    )
    parser.add_argument(
        "--calibration-rows", type=int, default=24, help="calibrate on this many rows"
    )
    parser.add_argument(
        "--skip",
        type=int,
        nargs=2,
        default=(0, 0),
        help="skip this many characters of each text",
    )
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    add_output_options(parser)
    options = parser.parse_args(arguments)

    source = load.open_model(options.model)
    text = Text(source)
    tokens, held_out = (
        tokens_of(text, path, skip, LENGTH * rows)
        for path, skip, rows in (
            (options.calibration, options.skip[0], options.calibration_rows),
            (options.held_out, options.skip[1], options.rows),
        )
    )
    model = load.load_model(source, stacked=True, decode="all", progress=False)
    with output(options):
        print_head(HEAD, WIDTHS, options.markdown)
        for cells in rows_of(model, options.only, tokens, held_out):
            print(format_row(cells, WIDTHS, options.markdown), flush=True)


if __name__ == "__main__":
    main()
