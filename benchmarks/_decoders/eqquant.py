"""The model of `examples/llama`, quantized by eqquant or dense."""

import importlib.metadata
import os
import pathlib
import sys

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from . import random_ends, random_layer, Shape


HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "examples" / "llama"))

from config import Config  # noqa: E402
from model import Cache, Decoder, empty_cache, Layer  # noqa: E402


# Maps a variant to the dtype of the model and the format of its weights.
variants = {
    "float32": (jnp.float32, None),
    "bfloat16": (jnp.bfloat16, None),
    "int8": (jnp.float32, eqquant.Int8()),
    "nf4": (jnp.float32, eqquant.NF4()),
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


def _skeleton(shape: Shape, dtype) -> Decoder:
    """Return the abstract model, with separate layers, as after `unstack`."""
    config, key = _config(shape), jax.random.key(0)
    model = eqx.filter_eval_shape(lambda: Decoder(config, dtype, key=key))
    layer = eqx.filter_eval_shape(lambda: Layer(config, dtype, key=key))
    layers = (layer,) * shape.layers
    return eqx.tree_at(lambda model: model.layers, model, layers)


def make(shape: Shape, variant: str, path: pathlib.Path) -> None:
    """Write the file of a variant. Only one float32 weight is in memory at a time."""
    dtype, format = variants[variant]

    def weight(w: np.ndarray):
        w = jnp.asarray(w, dtype)
        return w if format is None else eqquant.quantize(w, format)

    def ones(tree):
        return jax.tree.map(
            lambda a: jnp.ones(a.shape, a.dtype) if a.ndim == 1 else a, tree
        )

    def filled(layer: Layer, index: int) -> Layer:
        for name, w in random_layer(shape, index):
            block = "mlp" if hasattr(layer.mlp, name) else "attention"
            where = lambda layer, b=block, n=name: getattr(getattr(layer, b), n).weight
            layer = eqx.tree_at(where, layer, weight(w))
        return layer

    model = ones(_skeleton(shape, dtype))
    layers = tuple(filled(layer, i) for i, layer in enumerate(model.layers))
    model = eqx.tree_at(lambda model: model.layers, model, layers)
    for name, w in random_ends(shape):
        where = lambda model, n=name: getattr(model, n).weight
        model = eqx.tree_at(where, model, weight(w))
    eqquant.save(path, model, max_shard_size=None)


class Runs:
    def __init__(self, shape: Shape, variant: str, path: pathlib.Path):
        self.shape = shape
        self.dtype, _ = variants[variant]
        model = eqquant.load(path, like=_skeleton(shape, self.dtype))
        if variant.endswith(", default"):
            model = eqquant.with_compute(model, precision="default")
        arrays, static = eqx.partition(jax.block_until_ready(model), eqx.is_array)
        # JAX dispatches flat lists fastest, as in examples/llama/generate.py.
        self.arrays, treedef = jax.tree.flatten(arrays)
        self.like = eqx.filter_eval_shape(lambda: model)
        self.caches: dict[int, Cache | tuple[Cache, ...]] = {}

        def step(arrays, cache, tokens, start):
            model = eqx.combine(jax.tree.unflatten(treedef, arrays), static)
            hidden, cache = eqquant.quaxify(model.extend)(tokens, cache, start)
            logits = eqquant.quaxify(model.logits)(hidden[:, -1:])
            return jnp.argmax(logits, -1).astype(jnp.int32), cache

        self.step = jax.jit(step, donate_argnums=1)

    def version(self) -> str:
        return f"eqquant {importlib.metadata.version('eqquant')}, jax {jax.__version__}"

    def _empty(self):
        capacity = self.shape.prompt + self.shape.room
        return empty_cache(self.like, 1, capacity, self.dtype)

    def _prompt(self, cache):
        tokens = np.random.default_rng(0).integers(
            self.shape.vocabulary, size=(1, self.shape.prompt), dtype=np.int32
        )
        return jax.block_until_ready(self.step(self.arrays, cache, tokens, np.int32(0)))

    def prepare(self, sequences: int) -> None:
        _, cache = self._prompt(self._empty())
        self.caches[sequences] = jax.block_until_ready(
            jax.tree.map(lambda x: jnp.tile(x, (sequences, 1, 1)), cache)
        )
        self.caches.setdefault(0, self._empty())
        self.decode(sequences, 1)

    def prefill(self) -> None:
        # Old entries of the cache are overwritten or masked.
        _, self.caches[0] = self._prompt(self.caches[0])

    def decode(self, sequences: int, steps: int) -> None:
        tokens, cache = jnp.ones((sequences, 1), jnp.int32), self.caches[sequences]
        for i in range(steps):
            start = np.int32(self.shape.prompt + i)
            tokens, cache = self.step(self.arrays, cache, tokens, start)
            tokens = jax.block_until_ready(tokens)  # A user would read each token.
        self.caches[sequences] = cache


def load(shape: Shape, variant: str, path: pathlib.Path, threads: int) -> Runs:
    # XLA starts one thread for each core that the process can use.
    assert len(os.sched_getaffinity(0)) == threads
    return Runs(shape, variant, path)
