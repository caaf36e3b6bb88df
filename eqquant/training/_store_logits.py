"""Running a teacher once, and storing its logits."""

import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._jax import typed
from ..trees import check_forward, each_batch
from ._kl_divergence import check_temperature, top_logits, TopLogits
from ._pieces import AT_ONCE, rows_of
from ._stored_logits import digest_of, StoredLogits


_caller = "store_logits"


@typed
def store_logits(
    folder: str | os.PathLike,
    fn: Callable,
    model: Any,
    batches: Iterable,
    *,
    k: int = 64,
    temperature: float = 1.0,
    head: Callable | None = None,
    progress: bool | None = None,
) -> StoredLogits:
    """Run a teacher once, and store its most probable tokens in a folder, for
    [`eqquant.training.distill`][].

    Batches that are already in the folder are skipped. So you can continue after an
    interruption, and add batches later.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import functools as ft
        import jax
        import optax
        import tempfile

        model = eqx.nn.MLP(64, 500, 64, 1, key=jax.random.key(0))
        keys = jax.random.split(jax.random.key(1), 20)
        batches = [jax.random.normal(key, (32, 64)) for key in keys]
        forward = lambda model, batch: jax.vmap(model)(batch)
        folder = tempfile.mkdtemp()
        store = ft.partial(eqquant.training.store_logits, folder, forward, model)
        logits = store(batches, temperature=2.0)

        student = eqquant.quantize_tree(model, "int2")
        better, state = eqquant.training.distill(
            student, logits, forward, batches, optax.adam(1e-3)
        )
        ```

    **Arguments:**

    - `folder`: the path of a folder, which is made if it does not exist.
    - `fn`: `fn(model, batch)`, the logits `(*lead, vocabulary)`. Every index of `lead`
        is a position. With `head`, it returns hidden states `(*lead, size)`.
    - `model`: the teacher, usually the float model.
    - `batches`: an iterable of batches for `fn`.
    - `k`: the number of tokens per position. It takes 6 bytes per token, or 8 for more
        than 65,536 tokens in the vocabulary.
    - `temperature`: divide logits by this number, as in
        [`eqquant.training.kl_divergence`][].
    - `head`: as in [`eqquant.training.distill`][].
    - `progress`: show a progress bar, which requires tqdm. The default shows it for
        large models in a terminal.

    **Returns:** The [`eqquant.training.StoredLogits`][] in the folder.

    **Raises:**

    - `ValueError` if there are no batches, if logits are not finite, if `k` exceeds
        the vocabulary, or if the folder has logits of another model, `k`, vocabulary or
        temperature.
    - `TypeError` if `fn` or `head` does not return one floating-point array.
    """
    check_forward(fn, model, batches, _caller)
    check_temperature(temperature, _caller)
    arrays = [x for x in jax.tree.leaves(model) if eqx.is_array(x)]
    elements, stored = sum(x.size for x in arrays), None
    for i, batch in each_batch(
        batches, elements, progress, caller=_caller, title="storing logits"
    ):
        if stored is None:
            settings = {"k": k, "temperature": temperature, "model": digest_of(model)}
            settings["vocabulary"] = _vocabulary(model, batch, fn, head, k)
            stored = StoredLogits.opened(pathlib.Path(folder), _caller, **settings)
        if batch in stored:
            continue
        top = _top_logits(model, batch, fn, head, k, temperature)
        if np.any(np.isnan(top.log_probabilities)):
            raise ValueError(
                f"{_caller}: logits must be finite, but batch {i} has NaN."
            )
        stored.append(batch, top)
    assert stored is not None
    return stored


def _vocabulary(model: Any, batch: Any, fn: Callable, head: Any, k: int) -> int:
    def logits_of(model, batch):
        out = fn(model, batch)
        return out if head is None else head(model, rows_of(out))

    logits = eqx.filter_eval_shape(logits_of, model, batch)
    shape = getattr(logits, "shape", ())
    if not shape or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(
            f"{_caller}: fn must return one floating-point array of logits, got "
            f"{logits!r}."
        )
    if not 0 < k <= shape[-1]:
        raise ValueError(
            f"{_caller}: k must be from 1 to the vocabulary of {shape[-1]}, got {k}."
        )
    return shape[-1]


def _top_logits(
    model: Any, batch: Any, fn: Callable, head: Any, k: int, temperature: float
) -> TopLogits:
    if head is None:
        return _of_batch(model, batch, fn, k, temperature)
    hidden = rows_of(_run(model, batch, fn))
    tops = [
        _of_batch(model, hidden[start : start + AT_ONCE], head, k, temperature)
        for start in range(0, len(hidden), AT_ONCE)
    ]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *tops)


@eqx.filter_jit
def _of_batch(model, batch, fn, k, temperature):
    return top_logits(fn(model, batch), k, temperature)


@eqx.filter_jit
def _run(model, batch, fn):
    return fn(model, batch)
