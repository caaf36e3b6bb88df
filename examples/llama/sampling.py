"""Sampling of the next token."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray


@dataclasses.dataclass(frozen=True)
class Sampling:
    """A sampling method.

    **Arguments:**

    - `temperature`: divides the logits; 0 selects the most likely token.
    - `top_k`: sample from the `top_k` most likely tokens; 0 for all tokens.
    - `top_p`: sample from the most likely tokens with this total probability.
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 0.95

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}.")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 or more, got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0, at most 1, got {self.top_p}.")

    def __call__(
        self, logits: Float[Array, "batch vocabulary"], key: PRNGKeyArray
    ) -> Int[Array, " batch"]:
        if self.temperature == 0:
            return jnp.argmax(logits, -1)
        logits = logits / self.temperature
        if not self.top_k and self.top_p == 1:
            return jax.random.categorical(key, logits)
        vocabulary = logits.shape[-1]
        logits, tokens = lax.top_k(logits, min(self.top_k or vocabulary, vocabulary))
        if self.top_p < 1:
            probabilities = jax.nn.softmax(logits)
            likelier = jnp.cumsum(probabilities, -1) - probabilities
            # The most likely token is always included.
            logits = jnp.where(likelier < self.top_p, logits, -jnp.inf)
        place = jax.random.categorical(key, logits)
        return jnp.take_along_axis(tokens, place[:, None], -1)[:, 0]
