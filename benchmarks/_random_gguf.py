"""Write a GGUF file of a random model, with the tokenizer and the chat template of
another file."""

import functools as ft
import pathlib

import _gguf
import _llama_gguf
import numpy as np
from _decoders import Shape


# Q4_1: the number in ggml, and the values and bytes of a block. A block has two
# float16 values, the scale and the smallest value, and 16 bytes of codes.
_Q4_1, _BLOCK, _NBYTES = 3, 32, 20


def write(path: pathlib.Path, like: pathlib.Path, **sizes: int) -> None:
    """Write a model of 1.2 billion parameters in Q4_1, the shape of TinyLlama with the
    vocabulary of the file `like`. `sizes` are fields of `Shape`."""
    import eqquant

    given = eqquant.checkpoints.describe_checkpoint(like).metadata
    tokenizer = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in given.items()
        if key.startswith("tokenizer.")
    }
    vocabulary = len(tokenizer["tokenizer.ggml.tokens"])
    shape = Shape(vocabulary=vocabulary, **sizes)
    metadata = {**_llama_gguf.metadata(shape, context=2048), **tokenizer}
    matrix = ft.partial(_matrix, np.random.default_rng(0))
    _gguf.write(path, metadata, _llama_gguf.tensors(shape, matrix))


def _matrix(rng, layer: int | None, name: str, rows: int, columns: int) -> _gguf.Tensor:
    """Describe a matrix of uniform weights, like the initialization of
    `eqx.nn.Linear`."""
    del layer
    count, largest = rows * columns // _BLOCK, 1 / columns**0.5

    def data() -> np.ndarray:
        blocks = rng.integers(0, 256, (count, _NBYTES), np.uint8)
        ends = np.array([2 * largest / 15, -largest], np.float16)
        blocks[:, : ends.nbytes] = ends.view(np.uint8)
        return blocks

    return _gguf.Tensor(name, (rows, columns), _Q4_1, count * _NBYTES, data)
