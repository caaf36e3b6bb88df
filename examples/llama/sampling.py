"""Which token comes next."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray


@dataclasses.dataclass(frozen=True)
class Sampling:
    """**Arguments:**

    - `temperature`: logits are divided by it; 0 always takes the most likely token.
    - `top_k`: only so many of the most likely tokens; 0 for all of them.
    - `top_p`: only the most likely tokens that together have this probability.
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
            # The first is likelier than nothing, and so always in.
            logits = jnp.where(likelier < self.top_p, logits, -jnp.inf)
        place = jax.random.categorical(key, logits)
        return jnp.take_along_axis(tokens, place[:, None], -1)[:, 0]
