"""Packing of texts into rows of equal length, and the loss on these rows."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from model import Decoder


class Rows(NamedTuple):
    """Tokens, and the number of the text of each token; -1 for padding."""

    tokens: Int[np.ndarray, "rows length+1"]
    segments: Int[np.ndarray, "rows length+1"]

    def take(self, indices) -> "Rows":
        return Rows(self.tokens[indices], self.segments[indices])


def pack(texts: Sequence[Sequence[int]], length: int) -> Rows:
    """Pack all texts into rows.

    The last token of a row is also the first token of the next row. So each token,
    except the first of a text, is predicted once.
    """
    tokens = np.concatenate([np.asarray(text, np.int32) for text in texts])
    segments = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    rows = max(1, -(-(len(tokens) - 1) // length))
    pad = rows * length + 1 - len(tokens)
    tokens = np.pad(tokens, (0, pad))
    segments = np.pad(segments.astype(np.int32), (0, pad), constant_values=-1)
    window = np.arange(rows)[:, None] * length + np.arange(length + 1)
    return Rows(tokens[window], segments[window])


def losses(
    model: Decoder, rows: Rows, *, remat: bool = False
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the sum of the losses, in nats, and the number of predicted tokens.

    Padding and the first token of a text are not predicted.
    """
    tokens, segments = map(jnp.asarray, rows)
    logits = model(tokens[:, :-1], segments[:, :-1], remat=remat)
    counted = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.sum(each, where=counted), jnp.sum(counted)


def batch_at(rows: Rows, step: int, size: int, seed: int) -> Rows:
    """Return the batch of a step, as a function of the step only.

    Each epoch has its own order. A batch can begin in one epoch and end in the next.
    """
    count = len(rows.tokens)
    order = lambda epoch: np.random.default_rng([seed, epoch]).permutation(count)
    places = np.arange(step * size, (step + 1) * size)
    epochs = {epoch: order(epoch) for epoch in {int(p // count) for p in places}}
    return rows.take([epochs[int(p // count)][p % count] for p in places])
