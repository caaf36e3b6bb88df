"""Sampling of the next token."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray


# Sorting 49,152 logits takes 20 ms on CPUs, and selecting this many of them .13 ms.
_few = 512


def most_likely(
    logits: Float[Array, "batch vocabulary"],
) -> Int[Array, " batch"]:
    """Return the token with the largest logit, and the first of several.

    On CPUs, XLA does not vectorize `argmax`. This searches the blocks of the vocabulary
    first, and then one block.
    """
    batch, vocabulary = logits.shape
    blocks = logits.reshape(batch, -1, math.gcd(vocabulary, 512))
    # XLA may otherwise compute the largest of all logits in another pass.
    block = _first_of_largest(lax.optimization_barrier(blocks.max(-1)))
    found = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
    return block * blocks.shape[-1] + _first_of_largest(found)


def _first_of_largest(values: Float[Array, "batch size"]) -> Int[Array, " batch"]:
    last = values.shape[-1] - 1
    places = jnp.arange(last + 1, dtype=jnp.int32)
    is_largest = values == values.max(-1, keepdims=True)
    return jnp.where(is_largest, places, last).min(-1)


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
            return most_likely(logits)
        logits = logits / self.temperature
        vocabulary = logits.shape[-1]
        count = min(self.top_k or vocabulary, vocabulary)
        # `jax.random.categorical` draws a number for each token: 1.1 ms for 49,152.
        uniform = jax.random.uniform(key, (*logits.shape[:-1], 1))
        draw = lambda logits, tokens: self._draw(jnp.exp(logits), tokens, uniform)
        if count < vocabulary:
            logits, tokens = lax.top_k(logits, count)
            return draw(jax.nn.log_softmax(logits), tokens)
        logits = jax.nn.log_softmax(logits)
        if self.top_p == 1:
            tokens = jnp.arange(vocabulary, dtype=jnp.int32)
            return draw(logits, jnp.broadcast_to(tokens, logits.shape))
        everything = lambda: draw(*lax.top_k(logits, vocabulary))
        if vocabulary <= _few:
            return everything()
        # The tokens with the probability `top_p` are rarely more.
        likely, tokens = lax.top_k(logits, _few)
        is_enough = jnp.all(jnp.exp(likely).sum(-1) >= self.top_p)
        return lax.cond(is_enough, lambda: draw(likely, tokens), everything)

    def _draw(self, probabilities, tokens, uniform):
        """Draw one of `tokens` by a number between 0 and 1. Probabilities decrease, or
        `top_p` is 1."""
        sums = jnp.cumsum(probabilities, -1)
        # The most likely token is always included. Sums can round to more than 1.
        is_likely = (sums - probabilities < self.top_p) | (self.top_p == 1)
        total = jnp.where(is_likely, probabilities, 0).sum(-1, keepdims=True)
        place = (sums <= uniform * total).sum(-1, keepdims=True)
        place = jnp.minimum(place, is_likely.sum(-1, keepdims=True) - 1)
        return jnp.take_along_axis(tokens, place, -1)[:, 0]
