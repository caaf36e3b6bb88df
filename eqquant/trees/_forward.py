"""Checks of a forward pass and its batches."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax

from .._jax import given, wrong


def check_forward(
    fn: Any, model: Any, batches: Any, caller: str, order: str = "fn, model, batches"
) -> None:
    """Raise an error if `fn` and `model` are swapped, or if `batches` is one batch."""
    if callable(model) and _has_arrays(fn) and not _has_arrays(model):
        raise TypeError(
            f"{caller}: fn is {given(fn)} and model is {given(model)}: they are "
            f"swapped. Call `{caller}({order})`."
        )
    if isinstance(batches, Mapping | str) or hasattr(batches, "shape"):
        accepted = "an iterable of batches, such as a list"
        advice = "Pass `[batch]` for one batch."
        if hasattr(batches, "shape"):
            advice += " For a batch per index of the first axis pass `list(array)`."
        raise TypeError(wrong(caller, "batches", batches, accepted, advice))


def _has_arrays(tree: Any) -> bool:
    return any(map(eqx.is_array, jax.tree.leaves(tree)))
