"""Distillation: training a quantized model against its float model."""

import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._jax import typed
from ..checkpoints import load, save
from ..trees import check_forward, each_batch, float_arrays
from ._distillation_state import DistillationState, Optimiser, with_trained
from ._fake_quantize import FakeQuantized
from ._kl_divergence import kl_divergence, TopLogits, wide
from ._pieces import mean_over_pieces, rows_of
from ._stored_logits import StoredLogits


_caller = "distill"


def relative_error(outputs: Any, expected: Any) -> Float[Array, ""]:
    """Return the mean over output arrays of the relative squared error.

    The error of an array is absolute if its expected values are all zero.
    """
    errors = []
    for x, y in zip(float_arrays(outputs), float_arrays(expected), strict=True):
        x, y = wide(x), wide(y)
        power = jnp.sum(jnp.square(jnp.abs(y)))
        error = jnp.sum(jnp.square(jnp.abs(x - y)))
        errors.append(error / jnp.where(power > 0, power, 1))
    return jnp.mean(jnp.stack(errors))


@typed
def distill(
    student: Any,
    teacher: Any,
    fn: Callable,
    batches: Iterable,
    optimiser: Optimiser,
    *,
    head: Callable | None = None,
    loss: Callable | None = None,
    where: Any = None,
    state: DistillationState | None = None,
    checkpoint: str | os.PathLike | None = None,
    save_every: int = 100,
    progress: bool | None = None,
) -> tuple[Any, DistillationState]:
    """Train a quantized model to reproduce the outputs of a teacher.

    The teacher is usually the float model (Hinton et al., arXiv 1503.02531). No labels
    are needed. The trained arrays depend on `student`:

    - For a model with quantized weights, they are scales, offsets, norms, biases and
        all other floating-point arrays. Codes are frozen. Scales and offsets in 8, 6 or
        4 bits are trained as decoded values, which are rounded in each step; the outer
        number of their group is frozen. Powers of two, the scales of MXFP4, are frozen.
    - For an [`eqquant.FakeQuantized`][], they also include the float weights. This is
        quantization-aware training, for ternary and binary weights.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import optax

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        quantized = eqquant.quantize_tree(model, "int2")
        keys = jax.random.split(jax.random.key(1), 20)
        batches = [jax.random.normal(key, (32, 64)) for key in keys]


        def forward(model, batch):
            return jax.vmap(model)(batch)


        optimiser = optax.adam(1e-3)
        better, state = eqquant.training.distill(
            quantized, model, forward, batches, optimiser
        )
        codes = better.layers[0].weight.codes
        assert (codes == quantized.layers[0].weight.codes).all()
        ```

    The state can be saved regularly. An interrupted program then continues with the
    same results, bit for bit:

    !!! Example

        ```python
        import tempfile

        path = f"{tempfile.mkdtemp()}/state.safetensors"
        how = {"checkpoint": path, "save_every": 5}
        eqquant.training.distill(
            quantized, model, forward, batches[:10], optimiser, **how
        )
        # Continues after 10 batches.
        same, _ = eqquant.training.distill(
            quantized, model, forward, batches, optimiser, **how
        )
        assert eqx.tree_equal(same, better)
        ```

    Steps are compiled once for each batch shape, and again for each new `fn`, `head`,
    `loss` or `optimiser` object, so define these once.

    **Arguments:**

    - `student`: the model to train.
    - `teacher`: the model with the desired outputs. Its structure may differ. Or its
        logits for these batches, from [`eqquant.training.store_logits`][].
    - `fn`: `fn(model, batch)`, the forward pass of both models. It returns a pytree
        with floating-point arrays. If it also returns the activations of each layer,
        training needs far fewer steps. Set padding to zero. For a `FakeQuantized`, it
        receives the inner model with rounded weights.
    - `batches`: an iterable of batches for `fn`, with one step each.
    - `optimiser`: an `optax.GradientTransformation`, such as `optax.adam(1e-3)`.
    - `head`: `head(model, hidden)`, the logits `(positions, vocabulary)` of hidden
        states `(positions, size)`, which `fn` then returns as one array `(*lead,
        size)`. Logits exist only for 256 positions at a time. `loss` must be a mean
        over positions.
    - `loss`: `loss(outputs, expected)`, a number. The default is the relative squared
        error of each output array, averaged over arrays; for stored logits or with
        `head`, it is [`eqquant.training.kl_divergence`][].
    - `where`: the arrays to train, like a filter of `eqx.filter`: a function of an
        array, or a pytree prefix of bools. By default, all floating-point arrays.
    - `state`: the state to resume from, as another call returned it, for `batches` that
        follow. `student` must then be the argument of that call, not its result.
    - `checkpoint`: a path that ends with `.safetensors`, where the state is saved. If
        the file exists, training resumes from it, and skips the batches at the start of
        `batches` that the state has processed. `batches` must then be the same as in
        the interrupted call. Delete the file to start again.
    - `save_every`: the number of steps between writes of `checkpoint`. The state after
        the last batch is always written.
    - `progress`: show a progress bar, which requires tqdm. The default shows it for
        large models in a terminal.

    **Returns:**

    The trained quantized model, and an [`eqquant.training.DistillationState`][]. For a
    `FakeQuantized`, the model is the result of `.quantized()`.

    **Raises:**

    - `ValueError` if there are no batches, if no array is trained, if `fn` returns no
        floating-point array, if its outputs for student and teacher have different
        shapes, if the loss or a trained array is not finite, if `state` or `checkpoint`
        belongs to another student, if both are given, or if a batch has no stored
        logits.
    - `TypeError` if `loss` does not return a real number.
    - `ImportError` if `progress=True` and tqdm is not installed.
    """
    order = "student, teacher, fn, batches, optimiser"
    check_forward(fn, teacher, batches, _caller, order)
    start = eqx.filter_eval_shape(DistillationState, student, optimiser, where=where)
    if not jax.tree.leaves(start.trained):
        raise ValueError(
            f"{_caller}: nothing is trained, because where selects no floating-point "
            "array of student."
        )
    now = DistillationState(student, optimiser, where=where) if state is None else state
    done, path = 0, None
    if checkpoint is not None:
        path = _checked_path(checkpoint, state, save_every)
        if path.exists():
            now = load(path, like=now)
            done = int(now.steps)
            batches = _after(batches, done)
    if _described(now) != _described(start):
        raise ValueError(
            f"{_caller}: state belongs to another student, where or optimiser. Pass "
            "the student of the first call, not its result."
        )
    by_tokens = head is not None or isinstance(teacher, StoredLogits)
    default = kl_divergence if by_tokens else relative_error
    how = _How(fn, head, default if loss is None else loss, optimiser)
    elements = sum(x.size for x in jax.tree.leaves(now.trained))
    what = {"caller": _caller, "title": "distilling", "may_be_empty": bool(done)}
    is_saved = True
    for i, batch in each_batch(batches, elements, progress, **what):
        target = teacher.of(batch) if isinstance(teacher, StoredLogits) else teacher
        now, is_finite = _step(now, student, target, batch, how)
        if not is_finite:
            raise ValueError(
                f"{_caller}: the loss and the trained arrays must stay finite, but "
                f"batch {done + i} has the loss {float(now.loss)}. Check that the "
                "batch is finite, or lower the learning rate."
            )
        is_saved = path is None or (done + i + 1) % save_every == 0
        if path is not None and is_saved:
            save(path, now, max_shard_size=None)
    if path is not None and not is_saved:
        save(path, now, max_shard_size=None)
    return now.model(student), now


class _How(NamedTuple):
    fn: Callable
    head: Callable | None
    loss: Callable
    optimiser: Optimiser


@eqx.filter_jit
def _step(state, student, teacher, batch, how: _How):
    is_stored = isinstance(teacher, TopLogits)
    expected = teacher if is_stored else how.fn(_model(teacher), batch)

    def loss_of(trained):
        model = _model(with_trained(trained, student))
        outputs = how.fn(model, batch)
        if (head := how.head) is None:
            return _loss(how.loss, outputs, expected)

        def loss_of_piece(piece):
            hidden, known = piece
            known = known if is_stored else head(_model(teacher), known)
            return _loss(how.loss, head(model, hidden), known)

        known = expected if is_stored else _hidden(expected)
        return mean_over_pieces(loss_of_piece, (_hidden(outputs), known))

    value, gradients = eqx.filter_value_and_grad(loss_of)(state.trained)
    updates, optimiser_state = how.optimiser.update(
        gradients, state.optimiser_state, state.trained
    )
    trained = eqx.apply_updates(state.trained, updates)
    finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves((value, trained))]
    out = eqx.tree_at(
        lambda s: (s.trained, s.optimiser_state, s.steps, s.loss),
        state,
        (trained, optimiser_state, state.steps + 1, value.astype(jnp.float32)),
    )
    return out, jnp.all(jnp.stack(finite))


def _loss(loss: Callable, outputs: Any, expected: Any) -> Float[Array, ""]:
    if not isinstance(expected, TopLogits):
        _check_outputs(outputs, expected)
    value = loss(outputs, expected)
    if not _is_number(value):
        raise TypeError(
            f"{_caller}: loss must return a real number, got {_kind(value)}."
        )
    return value


def _hidden(outputs: Any) -> Float[Array, "positions size"]:
    if not eqx.is_inexact_array(outputs) or not outputs.ndim:
        raise ValueError(
            f"{_caller}: with head, fn must return one floating-point array of hidden "
            f"states, got {outputs!r}."
        )
    return rows_of(outputs)


def _checked_path(checkpoint: Any, state: Any, save_every: int) -> pathlib.Path:
    path = pathlib.Path(checkpoint)
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{_caller}: checkpoint must end with '.safetensors', got {str(path)!r}."
        )
    if state is not None:
        raise ValueError(
            f"{_caller}: state must be None with checkpoint, which contains a state."
        )
    if save_every < 1:
        raise ValueError(
            f"{_caller}: save_every must be a positive integer, got {save_every}."
        )
    return path


def _after(batches: Iterable, done: int) -> Iterable:
    """Return the batches that are not processed yet."""
    if isinstance(batches, Sequence):
        return batches[done:]
    return itertools.islice(batches, done, None)


def _model(x: Any) -> Any:
    return x.fake_quantized() if isinstance(x, FakeQuantized) else x


def _check_outputs(outputs: Any, expected: Any) -> None:
    student, teacher = _shapes(outputs), _shapes(expected)
    if student != teacher:
        raise ValueError(
            f"{_caller}: fn must return arrays of the same shapes for student and "
            f"teacher, got {student} and {teacher}."
        )
    if not float_arrays(outputs):
        raise ValueError(
            f"{_caller}: fn must return floating-point arrays, got {outputs!r}."
        )


def _shapes(outputs: Any) -> tuple[list, Any]:
    """Return the shapes of floating-point arrays, and the tree structure."""
    leaves, treedef = jax.tree.flatten(outputs)
    return [x.shape if eqx.is_inexact_array(x) else None for x in leaves], treedef


def _is_number(x: Any) -> bool:
    return jnp.shape(x) == () and jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _kind(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if eqx.is_array(x) else type(x).__name__


def _described(state: Any) -> tuple:
    leaves, treedef = jax.tree.flatten(eqx.filter(state, _has_shape))
    return treedef, [(x.shape, x.dtype) for x in leaves]


def _has_shape(x: Any) -> bool:
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
