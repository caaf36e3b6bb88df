"""Write a GGUF file of a random model, with the tokenizer and the chat template of
another file."""

import functools as ft
import pathlib
from collections.abc import Iterator

import _gguf
import numpy as np
from _decoders import Shape


# Q4_1: the number in ggml, and the values and bytes of a block. A block has two
# float16 values, the scale and the smallest value, and 16 bytes of codes.
_Q4_1, _BLOCK, _NBYTES = 3, 32, 20
_FLOAT32 = 0
_NAMES = {
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


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
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 2048,
        "llama.embedding_length": shape.size,
        "llama.block_count": shape.layers,
        "llama.feed_forward_length": shape.hidden,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": shape.head_size,
        "llama.vocab_size": shape.vocabulary,
    }
    _gguf.write(path, {**metadata, **tokenizer}, _tensors(shape))


def _tensors(shape: Shape) -> Iterator[_gguf.Tensor]:
    rng = np.random.default_rng(0)
    for name in ("token_embd", "output"):
        yield _matrix(rng, name, shape.vocabulary, shape.size)
    yield _norm("output_norm", shape.size)
    for i in range(shape.layers):
        for name, size in shape.matrices().items():
            yield _matrix(rng, f"blk.{i}.{_NAMES[name]}", *size)
        yield _norm(f"blk.{i}.attn_norm", shape.size)
        yield _norm(f"blk.{i}.ffn_norm", shape.size)


def _matrix(rng, name: str, rows: int, columns: int) -> _gguf.Tensor:
    """Describe a matrix of uniform weights, like the initialization of
    `eqx.nn.Linear`."""
    count, largest = rows * columns // _BLOCK, 1 / columns**0.5

    def data() -> np.ndarray:
        blocks = rng.integers(0, 256, (count, _NBYTES), np.uint8)
        ends = np.array([2 * largest / 15, -largest], np.float16)
        blocks[:, : ends.nbytes] = ends.view(np.uint8)
        return blocks

    return _gguf.Tensor(f"{name}.weight", (rows, columns), _Q4_1, count * _NBYTES, data)


def _norm(name: str, size: int) -> _gguf.Tensor:
    ones = ft.partial(np.ones, size, np.float32)
    return _gguf.Tensor(f"{name}.weight", (size,), _FLOAT32, 4 * size, ones)
