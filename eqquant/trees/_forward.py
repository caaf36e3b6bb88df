"""A forward pass and its batches: checks, and a loop."""

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import equinox as eqx
import jax

from .._jax import given, wrong
from ._progress import with_progress


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


def each_batch(
    batches: Iterable,
    elements: int,
    progress: bool | None,
    *,
    caller: str,
    title: str,
    may_be_empty: bool = False,
) -> Iterator[tuple[int, Any]]:
    """Yield each batch with its index, and show a progress bar.

    `elements` is the number of elements to process for each batch. Raises `ValueError`
    if there is no batch, unless `may_be_empty`.
    """
    work = elements * (len(batches) if isinstance(batches, Sized) else 1)
    what = title, "batch"
    index = -1
    shown = with_progress(batches, work, progress, caller=caller, what=what)
    for index, batch in enumerate(shown):
        yield index, batch
    if index < 0 and not may_be_empty:
        raise ValueError(f"{caller}: batches must have at least one batch, got none.")


def _has_arrays(tree: Any) -> bool:
    return any(map(eqx.is_array, jax.tree.leaves(tree)))
