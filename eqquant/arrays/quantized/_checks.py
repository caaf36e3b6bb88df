"""Checks of parts that code outside of eqquant has changed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import is_traced
from ...formats import abstract_scales
from ._structure import AbstractQuantizedArray


def check_codes(q: AbstractQuantizedArray) -> None:
    """Raise an error if arithmetic has changed the dtype of codes."""
    expected, actual = jnp.dtype(q.format.code_dtype), q.codes.dtype
    if actual != expected:
        raise TypeError(
            f"codes of {q.format!r} must be {expected}, got {actual}: an optimiser or "
            "an average has changed them. Codes cannot be trained or averaged. Give an "
            "optimiser the first half of `eqx.partition(model, "
            "eqquant.trainable_mask(model))`. To average models, average their "
            "dequantized weights and quantize the result. To train adapters beside "
            "quantized weights use `eqquant.lora_tree`; to train the weights "
            "themselves use `eqquant.FakeQuantized`."
        )


def check_lead(q: AbstractQuantizedArray) -> None:
    """Raise an error if codes and scales were sliced or mapped apart."""
    lead = q.codes.shape[:-1], q.scales.shape[:-1]
    if lead[0] != lead[1]:
        raise ValueError(
            f"scales of a quantized array must have the leading axes {lead[0]} of its "
            f"codes, got {lead[1]}. Slice, stack and map all parts in the same way."
        )


def check_cast_scales(q: AbstractQuantizedArray) -> None:
    """Raise an error if scales were cast to a dtype that cannot hold them.

    Values are only read if a dtype differs from the dtype of the format, outside of
    `jit`.
    """
    parts = jax.tree.leaves((q.scales, q.offsets))
    expected = jax.tree.leaves(abstract_scales(q.format))
    pairs = [(a.dtype, b.dtype) for a, b in zip(expected, parts, strict=False)]
    cast = [pair for pair in pairs if pair[0] != pair[1]]
    if not cast or not all(map(_has_values, parts)):
        return
    with jax.ensure_compile_time_eval():  # An array may be a constant of a `jit`.
        if count := _count_lost(q):
            raise ValueError(
                f"scales of {q.format!r} must be {cast[0][0]}, got {cast[0][1]}, in "
                f"which {count} of {q.scales.size} scales are zero or infinite. Cast "
                "the original model with `eqquant.cast_tree`, which keeps scales, "
                "instead of casting every array."
            )


def _count_lost(q: AbstractQuantizedArray) -> int:
    """Return the number of scales that are infinite, or zero for a block that is not
    zero."""
    scales, _ = q.float_parts
    lost = ~jnp.isfinite(scales)
    if jnp.any(scales == 0):
        # The codes of a block of zeros are equal.
        *lead, blocks = scales.shape
        states = q.format.ordered_states(q.codes)
        levels = q.format.levels(states, jnp.float32).reshape(*lead, blocks, -1)
        differ = jnp.max(levels, -1) != jnp.min(levels, -1)
        lost |= (scales == 0) & differ
    return int(jnp.sum(lost))


def _has_values(part: Any) -> bool:
    return isinstance(part, jax.Array | np.ndarray) and not is_traced(part)
