"""Quantize a language model, and compare its predictions with the float model."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from generate import Generator
from jaxtyping import Array, Bool, Float, Int
from model import Decoder
from sampling import Sampling
from text import Text


Tokens = Int[np.ndarray, "rows length"]
# A table of words predicts in few bits badly, and takes part in each prediction.
RULES = {"embedding.*": "int8"}


def forward(model: Decoder, tokens: Int[Array, "rows length"]) -> Array:
    return model(tokens)


def root_probabilities(model: Decoder, tokens: Int[Array, "rows length"]) -> Array:
    """Return a function of the predictions whose squared change is, to second order,
    twice the KL divergence."""
    return 2 * jnp.exp(jax.nn.log_softmax(forward(model, tokens)) / 2)


def rows_of(text: Text, characters: str, length: int, count: int) -> Tokens:
    """Return the first `count` rows of `length` tokens of a text.

    Raises a `ValueError` if the text is too short."""
    # Few tokens are longer than 20 characters on average.
    ids = text.encode(characters[: 20 * length * count])
    if len(ids) < length * count:
        raise ValueError(
            f"the text has {len(ids)} tokens, but {length * count} are needed."
        )
    return np.array(ids[: length * count], np.int32).reshape(count, length)


def calibrate(
    model: Decoder, tokens: Tokens, batch: int = 2, fn: Callable = forward, **options
) -> eqquant.calibration.Statistics:
    """Return statistics of the inputs of the layers, for batches of rows without
    padding. The options of `eqquant.calibrate` include other weights, or gradients."""
    defaults = {"rules": {"embedding.*": None}, "gradients_every": None}
    batches = np.array_split(tokens, -(-len(tokens) // batch))
    return eqquant.calibrate(
        fn, model, batches, every_row=True, **{**defaults, **options}
    )


def quantize(
    model: Decoder,
    format: eqquant.formats.Format | str | None,
    calibration: eqquant.calibration.Statistics | None = None,
    **options,
) -> Decoder:
    """Return the model with its matrices in `format`, and its embedding in INT8. With
    `None`, return the model."""
    if format is None:
        return model
    options = {"calibration": calibration, "progress": False, **options}
    return eqquant.quantize_tree(model, format, rules=RULES, **options)


class Comparison(NamedTuple):
    """The predictions of a model for held-out text.

    **Fields:**

    - `bytes`, `bits`: the size of the model, and bits per weight.
    - `mean`, `high`: the Kullback-Leibler divergence (KL) from the float model, in
        nats: the mean and the 99% quantile over tokens.
    - `perplexity`: of the next token.
    - `same`: the share of tokens with the same most likely next token.
    """

    bytes: int
    bits: float
    mean: float
    high: float
    perplexity: float
    same: float


@eqx.filter_jit
def log_probabilities(
    model: Decoder, tokens: Int[Array, " length"]
) -> Float[Array, "length-1 vocabulary"]:
    """Return the predictions for all tokens except the first."""
    logits = eqquant.quaxify(forward, on_materialise="error")(model, tokens[None])
    return jax.nn.log_softmax(logits[0, :-1].astype(jnp.float32))


def divergence(
    expected: Float[Array, "*lead vocabulary"], got: Float[Array, "*lead vocabulary"]
) -> tuple[Float[Array, "*lead"], Bool[Array, "*lead"]]:
    """Return the KL divergence of predictions from expected predictions, in nats, and
    whether both have the same most likely token. Both contain log probabilities."""
    kl = jnp.sum(jnp.exp(expected) * (expected - got), -1)
    return kl, expected.argmax(-1) == got.argmax(-1)


def bits_per_weight(model: Any) -> float:
    """Return the bits per weight of a whole model, with all scales."""
    leaves = jax.tree.leaves(model, is_leaf=eqquant.arrays.is_implicit)
    size = sum(leaf.size for leaf in leaves if hasattr(leaf, "size"))
    return 8 * eqquant.trees.nbytes(model) / size


@eqx.filter_jit
def _compared(expected, got, tokens):
    loss = -jnp.take_along_axis(got, tokens[1:, None], 1)[:, 0]
    kl, same = divergence(expected, got)
    return kl, loss, same


def compare(
    model: Decoder, tokens: Tokens, expected: Sequence[Array], is_float: bool = False
) -> Comparison:
    """Compare a model with the `log_probabilities` of the float model, for each row.

    `is_float` states that this is the float model, so that nothing is computed again.
    """
    rows = []
    for row, reference in zip(jnp.asarray(tokens), expected, strict=True):
        got = reference if is_float else log_probabilities(model, row)
        rows.append(_compared(reference, got, row))
    kl, loss, same = map(np.concatenate, zip(*rows, strict=True))
    return Comparison(
        eqquant.trees.nbytes(model),
        bits_per_weight(model),
        float(kl.mean()),
        float(np.quantile(kl, 0.99)),
        float(np.exp(loss.mean())),
        float(same.mean()),
    )


def sample(
    model: Decoder,
    text: Text,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling | None = None,
) -> tuple[list[int], float]:
    """Return the `count` tokens at most after a prompt, up to a stop token, and the
    tokens per second. The speed is the median over `count` tokens."""
    generator = Generator(model, len(prompt) + count, "int8", sampling)
    generator.compile(len(prompt))
    written, times = [generator.prefill(prompt)], [time.perf_counter()]
    for token in generator.decode(written[0], len(prompt)):
        written.append(token)
        times.append(time.perf_counter())
        if len(written) == count:
            break
    ends = [i for i, token in enumerate(written) if token in text.stop]
    return written[: ends[0] if ends else None], 1 / float(np.median(np.diff(times)))
