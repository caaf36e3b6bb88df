"""Language models of one shape in several libraries. Each file makes and runs one.

`_run_decoder.py` imports a file in a separate process, in an environment that contains
only NumPy and the library.
"""

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a Llama model. The default is the shape of TinyLlama."""

    layers: int = 22
    size: int = 2048
    hidden: int = 5632
    heads: int = 32
    kv_heads: int = 4
    vocabulary: int = 32_000
    # Tokens of the prompt, and the number of tokens that can follow.
    prompt: int = 512
    room: int = 128

    @property
    def head_size(self) -> int:
        return self.size // self.heads

    @property
    def parameters(self) -> int:
        layer = 2 * self.size + sum(a * b for a, b in self.matrices().values())
        return self.layers * layer + (2 * self.vocabulary + 1) * self.size

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Map the matrices of one layer to (outputs, inputs)."""
        narrow = self.kv_heads * self.head_size
        return {
            "query": (self.size, self.size),
            "key": (narrow, self.size),
            "value": (narrow, self.size),
            "output": (self.size, self.size),
            "gate": (self.hidden, self.size),
            "up": (self.hidden, self.size),
            "down": (self.size, self.hidden),
        }


def random_layer(shape: Shape, layer: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the matrices of a layer. They are the same for every library."""
    rng = np.random.default_rng(layer)
    for name, size in shape.matrices().items():
        yield name, random_matrix(rng, *size)


def random_ends(shape: Shape) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the embedding and the head."""
    rng = np.random.default_rng(shape.layers)
    for name in ("embedding", "head"):
        yield name, random_matrix(rng, shape.vocabulary, shape.size)


def random_matrix(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Draw uniform weights, like the initialization of `eqx.nn.Linear`."""
    w = rng.random((rows, columns), np.float32)
    w -= 0.5
    w *= 2 / columns**0.5
    return w


def prompt(vocabulary: int, length: int) -> np.ndarray:
    """Draw tokens of shape (1, length)."""
    rng = np.random.default_rng(0)
    return rng.integers(vocabulary, size=(1, length), dtype=np.int32)


class Decoder(Protocol):
    """A loaded model."""

    def version(self) -> str: ...

    def prepare(self, sequences: int, context: int) -> None:
        """Compile, and fill the caches of `sequences` sequences with `context`
        tokens."""
        ...

    def prefill(self) -> None:
        """Process a prompt, from an empty cache to the logits of its last token."""
        ...

    def decode(self, sequences: int, context: int, steps: int) -> None:
        """Generate `steps` tokens per sequence, after `context` tokens."""
        ...
