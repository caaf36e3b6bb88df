"""What the architectures differ in."""

import dataclasses
import math
from typing import Literal

import numpy as np
from jaxtyping import Float


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by a factor."""

    factor: float

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies are divided by a factor, high ones stay, and those between are
    interpolated."""

    factor: float
    low: float
    high: float
    original_length: int

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_length * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture. Defaults are those of Llama."""

    vocabulary: int
    size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int  # Of the MLP, or of each expert.
    tied: bool = False  # The head is the embedding.
    activation: Literal["silu", "gelu"] = "silu"
    norm_eps: float = 1e-5
    # Positions
    rope_theta: float = 10_000.0
    rope_scaling: LinearScaling | Llama3Scaling | None = None
    # Layers that see only so many tokens back, and their own rotation (Gemma 3).
    local: tuple[bool, ...] = ()
    window: int | None = None
    local_rope_theta: float | None = None
    # Attention
    query_key_value_bias: bool = False
    output_bias: bool = False
    query_key_norm: bool = False
    attention_scale: float | None = None  # By default 1 / sqrt(head_size).
    attention_softcap: float | None = None
    # Gemma
    norm_offset: float = 0.0  # Norms multiply by the weight plus this.
    post_norms: bool = False  # Norms after attention and after the MLP, too.
    scale_embedding: bool = False  # By the square root of `size`.
    logit_softcap: float | None = None
    # Mixtures of experts
    experts: int = 0
    active_experts: int = 0
    normalise_experts: bool = True  # The weights of those chosen sum to one.


def rope_frequencies(config: Config, local: bool = False) -> Float[np.ndarray, " half"]:
    """By how much each pair of features turns from one position to the next."""
    exponents = np.arange(0, config.head_size, 2) / config.head_size
    if local and config.local_rope_theta is not None:
        return np.float32(config.local_rope_theta**-exponents)
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        frequencies = config.rope_scaling(frequencies)
    return np.float32(frequencies)
