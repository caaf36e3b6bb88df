"""Decoders of the same shape, each by a library: files here make and run them.

They are imported in a process of their own (`_run_decoder.py`), where only NumPy and
the library itself are installed.
"""

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a model like Llama; the default is that of TinyLlama."""

    layers: int = 22
    size: int = 2048
    hidden: int = 5632
    heads: int = 32
    kv_heads: int = 4
    vocabulary: int = 32_000
    # Tokens of a prompt, and for how many more there is room.
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
        """Of one layer: how many outputs and inputs each has."""
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
    """The matrices of a layer, the same for every library, one by one."""
    rng = np.random.default_rng(layer)
    for name, of in shape.matrices().items():
        yield name, random_matrix(rng, *of)


def random_ends(shape: Shape) -> Iterator[tuple[str, np.ndarray]]:
    """The matrices that are no layer's."""
    rng = np.random.default_rng(shape.layers)
    for name in ("embedding", "head"):
        yield name, random_matrix(rng, shape.vocabulary, shape.size)


def random_matrix(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Uniform, as `eqx.nn.Linear` starts out."""
    w = rng.random((rows, columns), np.float32)
    w -= 0.5
    w *= 2 / columns**0.5
    return w


class Decoder(Protocol):
    """A model that is ready to run."""

    def version(self) -> str: ...

    def prepare(self, sequences: int) -> None:
        """Compile, and fill the cache of so many sequences with a prompt."""
        ...

    def prefill(self) -> None:
        """A prompt of one sequence, from an empty cache to the logits of its last
        token."""
        ...

    def decode(self, sequences: int, steps: int) -> None:
        """Steps of one token for each sequence, after a prompt."""
        ...
