"""Quantize the matrices of a language model with other libraries."""

import pathlib
from typing import Any

import _quantizers
import eqquant
import equinox as eqx
import jax
import numpy as np
from _llama_example import folder as folder_of_llama, names as names_of_llama
from _peer_weights import decoded_by


class Peers:
    """Quantizes the matrices of all layers with other libraries.

    The embedding is in INT8, and so is the head if it is another matrix. `tokens`,
    `(rows, length)`, are for libraries that calibrate. `kind` is the architecture.

    **Fields:**

    - `weights`: the matrices by their names in Hugging Face's files.
    """

    def __init__(self, model: Any, kind: str, tokens: np.ndarray, folder: pathlib.Path):
        self._model, self._tokens, self._folder = model, tokens, folder
        names = names_of_llama.tensor_names(kind, model.config)
        self._names, self.weights = {}, {}
        leaves = jax.tree_util.tree_leaves_with_path(model.layers)
        for path, leaf in leaves:
            if leaf.ndim == 3:
                path = f"layers.{names_of_llama.path_of(path)}"
                self._names[path] = names(path)
                self.weights |= names_of_llama.apart(names(path), np.asarray(leaf))

    def quantized(self, library: str, variant: str) -> tuple[Any, float]:
        """Return the model with the dequantized matrices of a variant of a library, and
        the bits per weight of the whole model.

        Raises a `RuntimeError` with the reason if the library fails, or cannot be
        installed."""
        checkpoint = self._folder / "checkpoint"
        if _quantizers.find()[library].reads_checkpoint and not checkpoint.exists():
            self._write(checkpoint)
        batches = ((row[None], np.ones((1, len(row)), bool)) for row in self._tokens)
        decoded, nbytes = decoded_by(
            library, variant, self._folder, self.weights, batches
        )
        return self._with(decoded, nbytes)

    def _write(self, checkpoint: pathlib.Path) -> None:
        checkpoint.mkdir()
        length = self._tokens.shape[-1]
        try:
            folder_of_llama.write_model(checkpoint, self._model, length)
        except ValueError as error:
            checkpoint.rmdir()
            raise RuntimeError(str(error)) from None

    def _with(self, decoded: Any, nbytes: int) -> tuple[Any, float]:
        def new(path, leaf):
            path = names_of_llama.path_of(path)
            if path not in self._names:
                return leaf
            return jax.numpy.stack([decoded[name] for name in self._names[path]])

        model = jax.tree_util.tree_map_with_path(new, self._model)
        size = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
        ends = lambda m: [m.embedding.weight, *([m.head.weight] if m.head else [])]
        codes = [eqquant.quantize(weight, "int8") for weight in ends(model)]
        model = eqx.tree_at(ends, model, codes)
        floats = sum(weight.nbytes for weight in self.weights.values())
        return model, 8 * (eqquant.trees.nbytes(model) - floats + nbytes) / size
