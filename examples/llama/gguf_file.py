"""A model in a GGUF file, as llama.cpp reads it: architecture, weights, tokenizer and
chat template."""

import dataclasses
import itertools
import pathlib

import eqquant
import equinox as eqx
import jax
import numpy as np
from config import DividedFrequencies
from gguf_config import config_of_gguf
from gguf_text import vocabulary_of_gguf
from gguf_values import Values
from joined import Joined
from mixed import Linear, Mixed
from model import Decoder, Layer
from names import gguf_names, Names
from vocabulary import Vocabulary


_frequencies = "rope_freqs.weight"
# Architectures whose queries and keys have another order of rows than in Hugging Face's
# files.
_interleaved = ("llama", "mistral3")


class GGUF:
    """A GGUF file, with the fields of `Folder`."""

    def __init__(self, path: pathlib.Path):
        found = eqquant.checkpoints.describe_checkpoint(path)
        if found.kind != "GGUF":
            raise ValueError(
                f"{path} is neither a GGUF file nor the folder of a model."
            )
        self.path, self._metadata = path, found.metadata
        self.tensors = found.tensors
        whole = Values(path, found.metadata, "")
        architecture = whole.text("general.architecture")
        values = Values(path, found.metadata, f"{architecture}.")
        self.context_length = values.integer("context_length", None)
        vocabulary = len(whole.texts("tokenizer.ggml.tokens"))
        self.kind, self.config = config_of_gguf(
            architecture, values, vocabulary, found.tensors
        )
        if _frequencies in found.tensors:
            factors = self._read_frequencies()
            self.config = dataclasses.replace(self.config, rope_scaling=factors)
        self.ignore = [_frequencies]
        self._is_interleaved = architecture in _interleaved
        inexact = {t.type for t in found.tensors.values() if not t.is_exact}
        self.types, self.inexact = found.formats, sorted(inexact)
        self.default = "int8" if self.inexact else None

    @property
    def names(self) -> Names:
        return gguf_names(self.config)

    def vocabulary(self) -> Vocabulary:
        return vocabulary_of_gguf(self.path, self._metadata)

    def arrange(self, model: Decoder) -> Decoder:
        """Return the model for the weights of the file: undo the order of the rows of
        queries and keys, in which llama.cpp rotates neighbours."""
        if not self._is_interleaved:
            return model

        def order_of(rows: int, heads: int) -> np.ndarray:
            return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

        def take(part, order: np.ndarray, axis: int):
            # In NumPy, because XLA would compile a program for each shape.
            return jax.device_put(np.take(np.asarray(part), order, axis))

        def rearrange(linear: Linear | Joined | None, heads: tuple[int, ...]):
            if linear is None:
                return None
            if isinstance(linear, Mixed):
                stacks = tuple(rearrange(stack, heads) for stack in linear.stacks)
                return Mixed(stacks, linear.kinds)
            rows = linear.weight.shape[-2]
            sizes = linear.sizes if isinstance(linear, Joined) else (rows,)
            starts = itertools.accumulate((0, *sizes))
            order = np.arange(rows)
            # Values, after queries and keys, keep their order.
            for start, size, count in zip(starts, sizes, heads, strict=False):
                order[start : start + size] = start + order_of(size, count)
            # The rows of all parts of a quantized array have the same axis.
            weight = jax.tree.map(lambda x: take(x, order, -2), linear.weight)
            bias = jax.tree.map(lambda x: take(x, order, -1), linear.bias)
            return eqx.tree_at(
                lambda x: (x.weight, x.bias),
                linear,
                (weight, bias),
                is_leaf=lambda x: x is None,
            )

        def of_layer(layer: Layer) -> Layer:
            where = lambda x: (x.attention.query, x.attention.key)
            query, key = where(layer)
            heads = self.config.heads, self.config.kv_heads
            new = rearrange(query, heads), rearrange(key, heads[1:])
            return eqx.tree_at(where, layer, new, is_leaf=lambda x: x is None)

        is_stack = isinstance(model.layers, Layer)
        layers = (
            of_layer(model.layers) if is_stack else tuple(map(of_layer, model.layers))
        )
        return eqx.tree_at(lambda m: m.layers, model, layers)

    def _read_frequencies(self) -> DividedFrequencies:
        """Read the factors of the frequencies of Llama 3."""
        if self.config.rope_scaling is not None:
            raise ValueError(
                f"{self.path}: {_frequencies} and rope.scaling cannot be combined."
            )
        half = self.config.head_size // 2
        (factors,) = eqquant.load_quantized(
            self.path,
            [jax.ShapeDtypeStruct((half,), np.float32)],
            None,
            names=lambda path: _frequencies,
            ignore="*",
            progress=False,
        )
        return DividedFrequencies(tuple(np.asarray(factors).tolist()))
