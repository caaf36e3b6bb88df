"""Measure how quantization changes the predictions of a language model.

    python benchmarks/language_accuracy.py MODEL.gguf CALIBRATION.txt HELD_OUT.txt

For each row, the script prints the bits per weight of the whole model, the
Kullback-Leibler divergence of the predictions from the float model (KL, in nats: the
mean and the 99% quantile over tokens), the perplexity, and the share of tokens with the
same most probable next token. The float model has the decoded weights of the file. The
embedding is in INT8 except in rows with "at most" and "llama.cpp".

"calibrated" means GPTQ with statistics of the first text, and rotation; "folded" means
that neighbouring weights contain rotations where that is possible; "tuned" means
AutoRound of one layer after the other, in 80 steps of 1,024 tokens; "curvature" means
statistics of the curvature of the KL divergence instead of the inputs; "corrected"
means that matrices are quantized in order, with GPTAQ and rotation; "not rotated" means
GPTQ only, and "rotated by N" a rotation of N values each. "distilled" then trains
scales and norms with another part of the first text. The float model runs once, and its
64 most probable tokens per position are stored. "at most N bits" allocates N bits per
weight of the whole model, including the embedding, to the matrices of each layer; "with
trellis" among trellis codes as well. The second text must be another one.

HQQ, torchao, GPTQModel and AutoRound quantize the matrices of the layers, each in its
own environment, with a block size of 64. GPTQModel and AutoRound calibrate with the
same tokens. Rows of libraries that cannot be installed, or that fail, are listed with
the reason on standard error.

"llama.cpp" is the file that `llama-quantize` writes with an importance matrix, which
contains the mean squares of the inputs in the same statistics. Its decoded weights are
evaluated like the others.

The seconds of each step are printed on standard error: of the processors, and in
parentheses by the clock.
"""

import argparse
import dataclasses
import functools as ft
import math
import pathlib
import re
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import eqquant
import equinox as eqx
import jax
import numpy as np
import optax
from _accuracy_rows import (
    Allocations,
    NF4,
    timed,
    TRELLIS,
    unless_missing,
    WITH_TRELLIS,
)
from _answers import Answers
from _correct_layers import corrected
from _environments import CACHE
from _fold_layers import folded
from _language_peers import Peers
from _llama_example import comparison, load, model as llama, text as texts_of_llama
from _llama_quantize import quantize_file
from _tables import add_output_options, format_row, output, print_head
from _tune_layers import tuned


class Row(NamedTuple):
    """The format of the matrices, options of `quantize_tree`, and the largest change of
    an array in a step of distillation, relative to its magnitude; or the number of bits
    to allocate, and the formats to choose from; or a type of llama.cpp; or another
    library and its variant."""

    format: eqquant.formats.Format | str | None
    is_calibrated: bool = False
    options: Mapping[str, Any] = types.MappingProxyType({})
    rate: float | None = None
    bits: float | None = None
    formats: Sequence[eqquant.formats.Format] = ()
    llama: str | None = None
    peer: tuple[str, str] | None = None
    curvature: bool = False
    corrected: bool = False
    folded: bool = False
    tuning_steps: int = 0


_rotated = {"rotate": True}
_tables = (eqquant.NF2(), eqquant.NF3(), NF4, eqquant.formats.Int6(), eqquant.Int8())
ROWS = {
    "float": Row(None),
    "int8": Row("int8"),
    "nf4": Row(NF4),
    "nf4, calibrated": Row(NF4, True, _rotated),
    "nf4, calibrated, folded": Row(NF4, folded=True),
    "nf4, calibrated, curvature": Row(NF4, True, _rotated, curvature=True),
    "nf4, corrected": Row(NF4, False, _rotated, corrected=True),
    "nf4, tuned": Row(NF4, False, _rotated, tuning_steps=80),
    "nf4, calibrated, search 8": Row(NF4, True, _rotated | {"search": 8}),
    "nvfp4": Row("nvfp4"),
    "nvfp4, calibrated": Row("nvfp4", True, _rotated),
    "nvfp4, not rotated": Row("nvfp4", True),
    "nvfp4, rotated by 16": Row("nvfp4", True, {"rotate": 16}),
    "mxfp4, calibrated": Row("mxfp4", True, _rotated),
    "mxfp4, not rotated": Row("mxfp4", True),
    "mxfp4, rotated by 32": Row("mxfp4", True, {"rotate": 32}),
    "nf3, calibrated": Row("nf3", True, _rotated),
    "nf3, calibrated, search 8": Row("nf3", True, _rotated | {"search": 8}),
    "nf2, calibrated": Row("nf2", True, _rotated),
    **{
        f"trellis{format.bits}, calibrated": Row(format, True, _rotated)
        for format in TRELLIS
    },
    **{
        f"trellis{format.bits}, calibrated, curvature": Row(
            format, True, _rotated, curvature=True
        )
        for format in TRELLIS[:2]
    },
    "nf4, calibrated, distilled": Row(NF4, True, _rotated, rate=5e-4),
    "nf3, calibrated, distilled": Row("nf3", True, _rotated, rate=3e-3),
    **{
        f"at most {bits} bits{name}": Row(
            None, True, _rotated, bits=bits, formats=formats
        )
        for bits in (3.25, 4.25, 5.05, 6.6)
        for name, formats in (("", _tables), (", with trellis", WITH_TRELLIS))
    },
    **{
        f"llama.cpp {type}": Row(None, True, llama=type)
        for type in ("Q5_K_M", "Q4_K_M", "IQ4_XS", "Q3_K_M", "IQ3_XXS", "Q2_K", "IQ2_M")
    },
    "torchao int8": Row(None, peer=("torchao", "int8, per row")),
    "torchao int4": Row(None, peer=("torchao", "int4, block size 64")),
    "torchao int4 + HQQ": Row(None, peer=("torchao", "int4 + HQQ, block size 64")),
    "HQQ int4": Row(None, peer=("hqq", "int4, block size 64")),
    "HQQ int3": Row(None, peer=("hqq", "int3, block size 64")),
    "GPTQModel int4": Row(None, peer=("gptqmodel", "int4, block size 64")),
    "GPTQModel int3": Row(None, peer=("gptqmodel", "int3, block size 64")),
    **{
        f"AutoRound int4, {steps} steps": Row(
            None, peer=("auto_round", f"int4, {steps} steps, block size 64")
        )
        for steps in (50, 200)
    },
}
HEAD = ("weights", "bits", "KL mean", "KL 99%", "perplexity", "same top token")
WIDTHS = (26, 6, 9, 9, 12, 15)
LENGTH = 512


def in_whole_blocks(row: Row, model) -> Row:
    """Return the row with trellis codes in blocks that divide the rows of all
    matrices: 192 values for SmolLM2, and 128 for Gemma."""
    layer = eqx.filter(model.layers, lambda x: eqx.is_array(x) and x.ndim > 2)
    size = math.gcd(*(leaf.shape[-1] for leaf in jax.tree.leaves(layer)))
    block = max(block for block in range(8, 257, 8) if size % block == 0)

    def fit(format):
        if not isinstance(format, eqquant.formats.Trellis):
            return format
        return dataclasses.replace(format, block_size=block)

    return row._replace(format=fit(row.format), formats=tuple(map(fit, row.formats)))


def calibration(
    model, tokens: np.ndarray, with_gradients: bool
) -> eqquant.calibration.Statistics:
    """Return statistics of all layers; with gradients, also of the embedding, and of
    the sensitivity of the results."""
    if not with_gradients:
        return comparison.calibrate(model, tokens)
    # The backward pass takes more memory.
    return comparison.calibrate(model, tokens, 1, rules=None, gradients_every=6)


def curvature(model, tokens: np.ndarray) -> eqquant.calibration.Statistics:
    options = {"gradients_every": 1, "curvature": True}
    return comparison.calibrate(
        model, tokens, 1, comparison.root_probabilities, **options
    )


def per_layer(
    stats: eqquant.calibration.Statistics,
) -> eqquant.calibration.Statistics:
    """Return statistics for the result of `unstack`."""
    weights = {}
    for path, known in stats.weights.items():
        if not path.startswith("layers."):
            weights[path] = known
            continue
        shape, axes = known.shape[1:], dataclasses.replace(known.axes, stack=())
        for i in range(known.shape[0]):
            sums = known.gram[i], known.rows[i], known.power[i]
            name = path.replace("layers.", f"layers.{i}.", 1)
            weights[name] = type(known)(*sums, shape, axes, False, known.unit)
    return eqquant.calibration.Statistics(weights)


def distilled(student, model, tokens: np.ndarray, folder: pathlib.Path, rate: float):
    """Train scales and norms for one pass over tokens `(rows, length)`."""
    batches = list(tokens[:, None])
    logits = eqquant.training.store_logits(
        folder, comparison.forward, model, batches, k=64
    )
    schedule = optax.warmup_cosine_decay_schedule(0, rate, 5, len(batches))
    optimiser = optax.chain(
        optax.scale_by_adam(b2=0.99),
        optax.scale_by_param_block_rms(),  # Scales and norms have other magnitudes.
        optax.scale_by_learning_rate(schedule),
    )
    fn = eqquant.quaxify(comparison.forward, on_materialise="error")
    return eqquant.training.distill(student, logits, fn, batches, optimiser)[0]


def importance(source: Any, stats: eqquant.calibration.Statistics) -> dict:
    """Return the mean squares of the inputs of each column, by the name of a tensor."""
    means = {}
    for path, known in stats.weights.items():
        if path.startswith("layers."):
            squares = np.diagonal(known.gram, axis1=-2, axis2=-1)
            count = np.asarray(known.rows)[:, None] * known.unit**2
            means |= zip(source.names(path), squares / count, strict=True)
    return means


def by_llama(source: Any, type: str, means: dict, folder: pathlib.Path) -> tuple:
    """Return the decoded model of a file that llama.cpp quantizes, and the bits per
    weight of the file."""
    target = folder / f"{type}.gguf"
    quantize_file(source.path, target, type, means, CACHE)
    file = load.open_model(target)
    model = load.load_model(file, stacked=True, decode="all", progress=False)
    tensors = file.tensors.values()
    bits = 8 * sum(t.nbytes for t in tensors) / sum(t.size for t in tensors)
    target.unlink()
    return model, bits


def cells_of(found: Any) -> tuple[str, ...]:
    return (
        f"{found.bits:.2f}",
        f"{found.mean:.4f}",
        f"{found.high:.3f}",
        f"{found.perplexity:.2f}",
        f"{found.same:.1%}",
    )


def quantized(model, row: Row, stats: Any, allocations: Any) -> Any:
    if row.bits is not None:
        return allocations.quantized(row.bits, row.formats)
    if row.format is None:
        return model
    if stats is not None:  # The embedding is rounded to nearest.
        known = {p: w for p, w in stats.weights.items() if p.startswith("layers.")}
        stats = eqquant.calibration.Statistics(known)
    calibration = stats if row.is_calibrated else None
    return comparison.quantize(model, row.format, calibration, **row.options)


def rows_of(
    model,
    names: list[str],
    tokens: np.ndarray,
    held_out: np.ndarray,
    training: np.ndarray,
    folder: pathlib.Path,
    source: Any = None,
    visit: Callable[[str, Any], None] = lambda name, model: None,
) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each row. `tokens`, `held_out` and `training` are `(rows,
    length)`. `source` is the file of the model, for llama.cpp. `visit` is called with
    the name and the model of each row."""
    expected = [comparison.log_probabilities(model, row) for row in held_out]
    rows = [in_whole_blocks(ROWS[name], model) for name in names]
    stats: Any = None
    curved: Any = None
    if any(row.curvature for row in rows):
        with timed("curvature"):
            curved = jax.block_until_ready(curvature(model, tokens))
    if any(row.is_calibrated and not row.curvature for row in rows):
        with timed("statistics"):
            stats = calibration(model, tokens, any(row.bits for row in rows))
            jax.block_until_ready(stats)
    allocations = None
    if any(row.bits for row in rows):
        allocations = Allocations(llama.unstack(model), per_layer(stats))
    peers = None
    if any(row.peer for row in rows):
        peers = Peers(model, source.kind, tokens, folder)

    def result_of(row: Row) -> tuple:
        if row.peer is not None and peers is not None:
            return peers.quantized(*row.peer)
        if row.llama is not None:
            return by_llama(source, row.llama, importance(source, stats), folder)
        if row.corrected:
            return corrected(model, tokens, row.format, **row.options), None
        if row.folded:
            return folded(model, tokens, row.format), None
        own = curved if row.curvature else stats
        result = quantized(model, row, own, allocations)
        if row.tuning_steps:
            result = tuned(result, model, tokens, row.tuning_steps)
        if row.rate is not None:
            result = distilled(result, model, training, folder, row.rate)
        return result, None

    for name, row in zip(names, rows, strict=True):
        with timed(name):
            is_other = row.peer is not None or row.llama is not None
            done = unless_missing(name, is_other, ft.partial(result_of, row))
            if done is None:
                continue
            result, bits = done
            jax.block_until_ready(eqx.filter(result, eqx.is_array))
        is_float = result is model
        found = comparison.compare(result, held_out, expected, is_float)
        found = found if bits is None else found._replace(bits=bits)
        visit(name, result)
        yield name, *cells_of(found)


def tokens_of(text: Any, path: pathlib.Path, skip: int, count: int) -> np.ndarray:
    """Return `(count, LENGTH)` tokens of a file, with runs of spaces joined."""
    characters = path.read_text(errors="replace")[skip : skip + 20 * LENGTH * count]
    try:
        joined = re.sub(r"[ \t]+", " ", characters)
        return comparison.rows_of(text, joined, LENGTH, count)
    except ValueError as error:
        raise ValueError(f"{path}, after {skip} characters: {error}") from None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
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
    parser.add_argument(
        "--distillation-rows", type=int, default=24, help="train on this many rows"
    )
    parser.add_argument(
        "--distillation-skip",
        type=int,
        default=2_000_000,
        help="skip this many characters of the first text for training",
    )
    parser.add_argument(
        "--answers",
        type=pathlib.Path,
        help="write the answers of each model to five questions to this file, beside "
        "the answers that it has",
    )
    add_output_options(parser)
    options = parser.parse_args(arguments)

    source = load.open_model(options.model)
    if any(ROWS[name].llama for name in options.only) and options.model.is_dir():
        parser.error("--only: llama.cpp needs a GGUF file.")
    text = texts_of_llama.Text(source)
    first, second = options.calibration, options.held_out
    parts = [
        (first, options.skip[0], options.calibration_rows),
        (second, options.skip[1], options.rows),
    ]
    if any(ROWS[name].rate is not None for name in options.only):
        parts.append((first, options.distillation_skip, options.distillation_rows))
    texts = [tokens_of(text, path, skip, rows) for path, skip, rows in parts]
    training = texts[2] if len(texts) > 2 else np.zeros((0, LENGTH), np.int32)
    model = load.load_model(source, stacked=True, decode="all", progress=False)
    with output(options), tempfile.TemporaryDirectory() as folder:
        print_head(HEAD, WIDTHS, options.markdown)
        inputs = [texts[0], texts[1], training, pathlib.Path(folder), source]
        if options.answers:
            inputs.append(Answers(text, options.answers).add)
        for cells in rows_of(model, options.only, *inputs):
            print(format_row(cells, WIDTHS, options.markdown), flush=True)


if __name__ == "__main__":
    main()
