"""The settings in which architectures differ."""

import dataclasses
import math
from typing import Literal

import numpy as np
from jaxtyping import Float


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Divide positions by a factor."""

    factor: float

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Divide low frequencies by a factor, keep high frequencies, and interpolate
    between the two."""

    factor: float
    low: float
    high: float
    original_length: int

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_length * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class DividedFrequencies:
    """Divide each frequency by its own factor. GGUF files have the scaling of Llama 3
    in this form."""

    factors: tuple[float, ...]

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / np.array(self.factors)


@dataclasses.dataclass(frozen=True)
class Config:
    """An architecture. The defaults describe Llama."""

    vocabulary: int
    size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int  # The hidden size of the MLP, or of each expert.
    tied: bool = False  # The output head is the embedding.
    activation: Literal["silu", "gelu"] = "silu"
    norm_eps: float = 1e-5
    # Positions
    rope_theta: float = 10_000.0
    rope_scaling: LinearScaling | Llama3Scaling | DividedFrequencies | None = None
    # The window of local layers, and their rotary base (Gemma 3).
    local: tuple[bool, ...] = ()
    window: int | None = None
    local_rope_theta: float | None = None
    # Attention
    query_key_value_bias: bool = False
    output_bias: bool = False
    query_key_norm: bool = False
    attention_scale: float | None = None  # The default is 1 / sqrt(head_size).
    attention_softcap: float | None = None
    # Gemma
    norm_offset: float = 0.0  # Norms add this to their weight.
    post_norms: bool = False  # Additional norms after attention and after the MLP.
    scale_embedding: bool = False  # Embeddings are multiplied by sqrt(size).
    logit_softcap: float | None = None
    # Mixtures of experts
    experts: int = 0
    active_experts: int = 0
    normalise_experts: bool = True  # The weights of the selected experts sum to one.


def rope_frequencies(config: Config, local: bool = False) -> Float[np.ndarray, " half"]:
    """Return the rotation of each pair of features per position, in radians."""
    exponents = np.arange(0, config.head_size, 2) / config.head_size
    if local and config.local_rope_theta is not None:
        return np.float32(config.local_rope_theta**-exponents)
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        frequencies = config.rope_scaling(frequencies)
    return np.float32(frequencies)
