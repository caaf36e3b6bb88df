"""The model of `examples/llama`, quantized by eqquant or dense."""

# The path of `examples/llama` is only known at run time.
# pyright: reportMissingImports=false

import importlib.metadata
import os
import pathlib
import sys
from typing import Any

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from . import prompt, random_ends, random_layer, Shape


HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "examples" / "llama"))

from config import Config  # noqa: E402
from generate import quantize_cache  # noqa: E402
from load import load_in, open_model  # noqa: E402
from model import Decoder, empty_cache, Layer, unstack  # noqa: E402
from program_cache import release_freed  # noqa: E402
from sampling import most_likely  # noqa: E402


# Maps a variant to the dtype of the model and the format of its weights.
variants = {
    "float32": (jnp.float32, None),
    "bfloat16": (jnp.bfloat16, None),
    "int8": (jnp.float32, eqquant.Int8()),
    "nf4": (jnp.float32, eqquant.NF4()),
    "nf4, apart": (jnp.float32, eqquant.NF4()),
    "ternary": (jnp.float32, eqquant.Ternary()),
    # Activations are rounded to 8 bits, as in llama.cpp.
    "int8, default": (jnp.float32, eqquant.Int8()),
    "nf4, default": (jnp.float32, eqquant.NF4()),
    "ternary, default": (jnp.float32, eqquant.Ternary()),
}
suffix = ".safetensors"


def _config(shape: Shape) -> Config:
    return Config(
        vocabulary=shape.vocabulary,
        size=shape.size,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        hidden=shape.hidden,
    )


def _skeleton(shape: Shape, dtype, is_stack: bool) -> Decoder:
    """Return the abstract model, with a stack of layers or separate layers."""
    make = lambda: Decoder(_config(shape), dtype, key=jax.random.key(0))
    if is_stack:
        return eqx.filter_eval_shape(make)
    return eqx.filter_eval_shape(lambda: unstack(make()))


def make(shape: Shape, variant: str, path: pathlib.Path) -> None:
    """Write the file of a variant. Only one float32 weight is in memory at a time."""
    dtype, format = variants[variant]

    def skeleton():
        model = _skeleton(shape, dtype, format is not None)
        model = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), model)
        if format is None:
            return model
        return eqquant.quantize_tree(model, format, progress=False)

    model = jax.tree.map(
        lambda x: np.ones(x.shape, x.dtype), eqx.filter_eval_shape(skeleton)
    )

    def fill(linear, w: np.ndarray, at: Any = ...) -> None:
        weight = jnp.asarray(w, dtype)
        if format is not None:
            weight = eqquant.quantize(weight, format)
        parts = jax.tree.leaves(linear.weight), jax.tree.leaves(weight)
        for whole, part in zip(*parts, strict=True):
            whole[at] = part

    for i in range(shape.layers):
        is_stack = isinstance(model.layers, Layer)
        layer, at = (model.layers, i) if is_stack else (model.layers[i], ...)
        for name, w in random_layer(shape, i):
            block = layer.mlp if hasattr(layer.mlp, name) else layer.attention
            fill(getattr(block, name), w, at)
    for name, w in random_ends(shape):
        fill(getattr(model, name), w)
    eqquant.save(path, model, max_shard_size=None)


class Runs:
    def __init__(self, shape: Shape, model: Decoder, kv: str | None):
        self.shape, self.kv = shape, kv
        self.dtype = model.norm.weight.dtype
        arrays, static = eqx.partition(jax.block_until_ready(model), eqx.is_array)
        # JAX dispatches flat lists fastest, as in examples/llama/generate.py.
        self.arrays, treedef = jax.tree.flatten(arrays)
        self.like = eqx.filter_eval_shape(lambda: model)
        self.caches: dict[tuple[int, int], list[jax.Array]] = {}  # Parts of caches.

        @eqquant.quaxify
        def extend(model, cache, tokens, start):
            hidden, cache = model.extend(tokens, cache, start)
            logits = model.logits(hidden[:, -1:])
            return most_likely(logits[:, 0])[:, None], cache

        cache_treedef = jax.tree.structure(self._cache(0))

        def step(arrays, parts, *args):
            # `quaxify` needs quantized arrays, rather than their parts.
            model = eqx.combine(jax.tree.unflatten(treedef, arrays), static)
            cache = jax.tree.unflatten(cache_treedef, parts)
            tokens, cache = extend(model, cache, *args)
            return tokens, jax.tree.leaves(cache)

        self.step = jax.jit(step, donate_argnums=1)

    def version(self) -> str:
        return f"eqquant {importlib.metadata.version('eqquant')}, jax {jax.__version__}"

    def _cache(self, context: int):
        """Return the shapes of a cache."""
        capacity = self._padded(context) + self.shape.room

        def make():
            cache = empty_cache(self.like, 1, capacity, self.dtype)
            return cache if self.kv is None else quantize_cache(cache, self.kv)

        return eqx.filter_eval_shape(make)

    def _empty(self, context: int) -> list[jax.Array]:
        # Filled, as in examples/llama/generate.py: no program quantizes float zeros.
        zeros = lambda x: jax.device_put(np.zeros(x.shape, x.dtype))
        return list(map(zeros, jax.tree.leaves(self._cache(context))))

    def _padded(self, length: int) -> int:
        return -(-length // self.shape.prompt) * self.shape.prompt

    def _prompt(self, cache, length: int):
        """Process a prompt in whole pieces. Entries after `length` are masked later."""
        tokens = prompt(self.like.config.vocabulary, self._padded(length))
        for start in range(0, length, self.shape.prompt):
            piece = tokens[:, start : start + self.shape.prompt]
            _, cache = self.step(self.arrays, cache, piece, np.int32(start))
        return jax.block_until_ready(cache)

    def prepare(self, sequences: int, context: int) -> None:
        cache = self._prompt(self._empty(context), context)
        if sequences > 1:  # The third axis from the end has the heads of all sequences.
            cache = jax.tree.map(lambda x: jnp.concatenate([x] * sequences, -3), cache)
        self.caches[sequences, context] = jax.block_until_ready(cache)
        release_freed(None)
        self.decode(sequences, context, 1)
        release_freed(None)

    def prefill(self) -> None:
        # Old entries of the cache are overwritten or masked.
        if is_first := (0, 0) not in self.caches:
            self.caches[0, 0] = self._empty(self.shape.prompt)
        self.caches[0, 0] = self._prompt(self.caches[0, 0], self.shape.prompt)
        if is_first:  # This call compiled a program.
            release_freed(None)

    def decode(self, sequences: int, context: int, steps: int) -> None:
        cache = self.caches.pop((sequences, context))  # The first step donates it.
        tokens = before = jnp.ones((sequences, 1), jnp.int32)
        for i in range(steps):
            start = np.int32(context + i)
            tokens, cache = self.step(self.arrays, cache, tokens, start)
            # A user reads each token, while the next one is computed.
            np.asarray(before)
            before = tokens
        np.asarray(before)
        self.caches[sequences, context] = cache


def load(shape: Shape, variant: str, path: pathlib.Path, threads: int) -> Runs:
    """Load the file of a variant, or a GGUF file at the precision `variant`."""
    # XLA starts one thread for each core that the process can use.
    assert len(os.sched_getaffinity(0)) == threads
    if path.suffix == ".gguf":
        model = load_in(open_model(path), None, {"int8": "int8"}, joined=True)
        model = eqquant.with_compute(model, precision=variant)
        return Runs(shape, model, "int8")
    dtype, format = variants[variant]
    model = eqquant.load(path, like=_skeleton(shape, dtype, format is not None))
    if variant.endswith(", default"):
        model = eqquant.with_compute(model, precision="default")
    if variant.endswith(", apart"):
        model = jax.jit(unstack)(model)
    return Runs(shape, model, None)
