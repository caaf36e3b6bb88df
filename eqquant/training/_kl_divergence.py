"""The Kullback-Leibler divergence of predicted tokens."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from .._jax import typed, wide_dtype


_caller = "kl_divergence"


class TopLogits(eqx.Module):
    """The most probable tokens at each position, as a language model predicts them.

    [`eqquant.training.StoredLogits`][] reads them from files.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import tempfile

        teacher = eqx.nn.Linear(16, 500, key=jax.random.key(0))
        batch = jax.random.normal(jax.random.key(1), (32, 16))
        forward = lambda model, batch: jax.vmap(model)(batch)
        folder = tempfile.mkdtemp()
        stored = eqquant.training.store_logits(folder, forward, teacher, [batch])
        top = stored.of(batch)
        assert isinstance(top, eqquant.training.TopLogits)
        assert (top.indices[:, 0] == forward(teacher, batch).argmax(-1)).all()
        ```

    **Fields:**

    - `indices`: `(positions, k)`: the most probable tokens.
    - `log_probabilities`: `(positions, k + 1)`: the logarithms of their probabilities,
        and last of the probability of all other tokens; `-inf` if there are none.
    - `vocabulary`: the number of tokens in the vocabulary.
    - `temperature`: the number by which the logits were divided.
    """

    indices: Integer[Array, "positions k"]
    log_probabilities: Float[Array, "positions k_and_rest"]
    vocabulary: int = eqx.field(static=True)
    temperature: float = eqx.field(static=True)


def top_logits(
    logits: Float[Array, "*lead vocabulary"], k: int, temperature: float
) -> TopLogits:
    """Return the `k` most probable tokens at each position."""
    vocabulary = logits.shape[-1]
    logits = wide(logits.reshape(-1, vocabulary)) / temperature
    _, indices = jax.lax.top_k(logits, k)
    grouped = _grouped(logits, indices)
    return TopLogits(indices, grouped, vocabulary, temperature)


@typed
def kl_divergence(
    outputs: Float[Array, "*lead vocabulary"],
    expected: Float[Array, "*lead vocabulary"] | TopLogits,
    *,
    temperature: float | None = None,
) -> Float[Array, ""]:
    """Return the Kullback-Leibler divergence of predicted tokens from expected ones, in
    nats, averaged over positions: a `loss` of [`eqquant.training.distill`][].

    If `expected` are the most probable tokens, all other tokens count as one outcome.
    The result is then a lower bound, and zero for equal predictions.

    !!! Example

        ```python
        import eqquant
        import jax

        logits = jax.random.normal(jax.random.key(0), (8, 100))
        kl = eqquant.training.kl_divergence(0.9 * logits, logits)
        assert 0 < kl < 0.01
        assert eqquant.training.kl_divergence(logits, logits) == 0
        ```

    **Arguments:**

    - `outputs`: logits, not divided by the temperature.
    - `expected`: logits, or the most probable tokens from
        [`eqquant.training.StoredLogits`][].
    - `temperature`: the number by which both logits are divided (Hinton et al., arXiv
        1503.02531). More than 1 increases the weight of improbable tokens. The default
        is the temperature of `expected`, or 1.

    **Raises:**

    `ValueError` if `expected` has another vocabulary, another number of positions or
    another temperature, or if `temperature` is not positive.
    """
    own = expected.temperature if isinstance(expected, TopLogits) else 1.0
    divisor = own if temperature is None else temperature
    check_temperature(divisor, _caller)
    positions, vocabulary = math.prod(outputs.shape[:-1]), outputs.shape[-1]
    logits = wide(outputs.reshape(positions, vocabulary)) / divisor
    if not isinstance(expected, TopLogits):
        targets = wide(expected.reshape(positions, vocabulary)) / divisor
        return _mean_divergence(jax.nn.log_softmax(logits), jax.nn.log_softmax(targets))
    if divisor != own:
        raise ValueError(
            f"{_caller}: temperature must be {own}, for which the expected logits were "
            f"stored, got {divisor}."
        )
    stored = len(expected.indices), expected.vocabulary
    if (positions, vocabulary) != stored:
        raise ValueError(
            f"{_caller}: outputs must have {stored[0]} positions and a vocabulary of "
            f"{stored[1]}, like the expected logits, got {outputs.shape}."
        )
    # Rounding of the stored numbers must not change the sum of probabilities.
    targets = jax.nn.log_softmax(expected.log_probabilities)
    return _mean_divergence(_grouped(logits, expected.indices), targets)


def _grouped(
    logits: Float[Array, "positions vocabulary"],
    indices: Integer[Array, "positions k"],
) -> Float[Array, "positions k_and_rest"]:
    """Return log probabilities of the tokens at `indices`, and of all others."""
    rows = jnp.arange(len(logits))[:, None]
    top = logits[rows, indices]
    # Not a difference of sums, which would lose all digits of a small rest.
    others = logits.at[rows, indices].set(-jnp.inf, unique_indices=True)
    rest = _log_sum(others)
    return jax.nn.log_softmax(jnp.concatenate([top, rest], 1))


def _log_sum(x: Float[Array, "rows size"]) -> Float[Array, "rows 1"]:
    """Return the logarithm of the sum of exponentials; `-inf`, with a gradient of zero,
    for a row of `-inf`."""
    is_empty = jnp.all(x == -jnp.inf, 1, keepdims=True)
    sums = jax.nn.logsumexp(jnp.where(is_empty, 0, x), axis=1, keepdims=True)
    return jnp.where(is_empty, -jnp.inf, sums)


def _mean_divergence(
    log_q: Float[Array, "positions outcomes"], log_p: Float[Array, "positions outcomes"]
) -> Float[Array, ""]:
    is_possible = log_p > -jnp.inf
    ratio = jnp.where(is_possible, log_p, 0) - jnp.where(is_possible, log_q, 0)
    return jnp.mean(jnp.sum(jnp.exp(log_p) * ratio, -1))


def wide(x: Array) -> Array:
    return x.astype(wide_dtype(x.dtype))


def check_temperature(temperature: float, caller: str) -> None:
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"{caller}: temperature must be a positive number, got {temperature}."
        )
