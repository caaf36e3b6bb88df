"""A model in a GGUF file, as llama.cpp reads it: architecture, weights, tokenizer and
chat template."""

import dataclasses
import pathlib

import eqquant
import equinox as eqx
import jax
import numpy as np
from config import DividedFrequencies
from gguf_config import config_of_gguf
from gguf_text import vocabulary_of_gguf
from gguf_values import Values
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

        def apart(part, heads: int, axis: int):
            # In NumPy, because XLA would compile a program for each shape.
            pairs = np.arange(part.shape[axis]).reshape(heads, -1, 2)
            order = pairs.swapaxes(1, 2).reshape(-1)
            return jax.device_put(np.take(np.asarray(part), order, axis))

        def rearrange(linear: Linear, heads: int) -> Linear:
            if isinstance(linear, Mixed):
                stacks = tuple(rearrange(stack, heads) for stack in linear.stacks)
                return Mixed(stacks, linear.kinds)
            # The rows of all parts of a quantized array have the same axis.
            weight = jax.tree.map(lambda x: apart(x, heads, -2), linear.weight)
            bias = jax.tree.map(lambda x: apart(x, heads, -1), linear.bias)
            return eqx.tree_at(
                lambda x: (x.weight, x.bias),
                linear,
                (weight, bias),
                is_leaf=lambda x: x is None,
            )

        def of_layer(layer: Layer) -> Layer:
            attention = layer.attention
            new = (
                rearrange(attention.query, self.config.heads),
                rearrange(attention.key, self.config.kv_heads),
            )
            return eqx.tree_at(
                lambda x: (x.attention.query, x.attention.key), layer, new
            )

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
