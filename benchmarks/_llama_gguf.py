"""The metadata and the tensors of a Llama model in a GGUF file."""

import functools as ft
from collections.abc import Callable, Iterator

import _gguf
import numpy as np
from _decoders import Shape


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
Matrix = Callable[[int | None, str, int, int], _gguf.Tensor]


def metadata(shape: Shape, context: int) -> dict[str, _gguf.Value]:
    """Return the metadata without a tokenizer, for `context` tokens."""
    return {
        "general.architecture": "llama",
        "llama.context_length": context,
        "llama.embedding_length": shape.size,
        "llama.block_count": shape.layers,
        "llama.feed_forward_length": shape.hidden,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": shape.head_size,
        "llama.vocab_size": shape.vocabulary,
    }


def tensors(shape: Shape, matrix: Matrix) -> Iterator[_gguf.Tensor]:
    """Yield all tensors, with norms of ones.

    `matrix(layer, name, rows, columns)` describes a matrix. The layer of the embedding
    and of the head is None.
    """
    for name in ("token_embd.weight", "output.weight"):
        yield matrix(None, name, shape.vocabulary, shape.size)
    yield _norm("output_norm", shape.size)
    for i in range(shape.layers):
        for name, size in shape.matrices().items():
            yield matrix(i, f"blk.{i}.{_NAMES[name]}.weight", *size)
        yield _norm(f"blk.{i}.attn_norm", shape.size)
        yield _norm(f"blk.{i}.ffn_norm", shape.size)


def _norm(name: str, size: int) -> _gguf.Tensor:
    ones = ft.partial(np.ones, size, np.float32)
    return _gguf.Tensor(f"{name}.weight", (size,), _FLOAT32, 4 * size, ones)
