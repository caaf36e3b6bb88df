"""Distillation: training a quantized model against its float model."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._jax import typed, wide_dtype
from ..trees import check_forward, each_batch, float_arrays
from ._fake_quantize import FakeQuantized


_caller = "distill"


@runtime_checkable
class Optimiser(Protocol):
    """An `optax.GradientTransformation`, or an object with the same two functions."""

    @property
    def init(self) -> Callable: ...

    @property
    def update(self) -> Callable: ...


class DistillationState(eqx.Module):
    """The state of [`eqquant.training.distill`][], a pytree of arrays.

    [`eqquant.save`][] and `eqx.tree_serialise_leaves` can store it. A new instance is
    the initial state, and also serves as `like` of [`eqquant.load`][].

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import optax
        import tempfile

        model = eqx.nn.MLP(64, 10, 64, 1, key=jax.random.key(0))
        student = eqquant.quantize_tree(model, "int2")
        state = eqquant.training.DistillationState(student, optax.adam(1e-3))
        path = f"{tempfile.mkdtemp()}/state.safetensors"
        eqquant.save(path, state)
        assert eqquant.load(path, like=state).steps == 0
        ```

    **Fields:**

    - `trained`: the trained arrays, and None for all others. They are at least float32,
        because bfloat16 cannot represent small steps.
    - `optimiser_state`: the state of the optimiser.
    - `steps`: the number of processed batches.
    - `loss`: the loss of the last batch before its step; zero initially.
    """

    trained: Any
    optimiser_state: Any
    steps: Int[Array, ""]
    loss: Float[Array, ""]

    @typed
    def __init__(self, student: Any, optimiser: Optimiser, *, where: Any = None):
        """**Arguments:** `student`, `optimiser` and `where` as in
        [`eqquant.training.distill`][]."""
        chosen = student if where is None else eqx.filter(student, where)
        chosen = eqx.filter(chosen, eqx.is_inexact_array)
        self.trained = jax.tree.map(_wide, chosen)
        self.optimiser_state = optimiser.init(self.trained)
        self.steps = jnp.zeros((), jnp.int32)
        self.loss = jnp.zeros((), jnp.float32)

    def model(self, student: Any) -> Any:
        """Return the quantized model in its current state.

        `student` is the argument of [`eqquant.training.distill`][].
        """
        out = _put(self.trained, student)
        return out.quantized() if isinstance(out, FakeQuantized) else out


def relative_error(outputs: Any, expected: Any) -> Float[Array, ""]:
    """Return the mean over output arrays of the relative squared error.

    The error of an array is absolute if its expected values are all zero.
    """
    errors = []
    for x, y in zip(float_arrays(outputs), float_arrays(expected), strict=True):
        x, y = _wide(x), _wide(y)
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
    loss: Callable | None = None,
    where: Any = None,
    state: DistillationState | None = None,
    progress: bool | None = None,
) -> tuple[Any, DistillationState]:
    """Train a quantized model to reproduce the outputs of a teacher.

    The teacher is usually the float model (Hinton et al., arXiv 1503.02531). No labels
    are needed. The trained arrays depend on `student`:

    - For a model with quantized weights, they are scales, offsets, norms, biases and
        all other floating-point arrays. Codes are frozen.
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

    This is a pure function. Two calls, the second with the `state` of the first, give
    the same bits as one call with all batches. So you can save the state regularly, and
    resume after an interruption:

    !!! Example

        ```python
        import tempfile

        start = eqquant.training.DistillationState(quantized, optimiser)
        _, state = eqquant.training.distill(
            quantized, model, forward, batches[:10], optimiser, state=start
        )
        path = f"{tempfile.mkdtemp()}/state.safetensors"
        eqquant.save(path, state)

        state = eqquant.load(path, like=start)
        same, _ = eqquant.training.distill(
            quantized, model, forward, batches[10:], optimiser, state=state
        )
        assert eqx.tree_equal(same, better)
        ```

    Steps are compiled once for each batch shape, and again for each new `fn`, `loss` or
    `optimiser` object, so define these once.

    **Arguments:**

    - `student`: the model to train.
    - `teacher`: the model with the desired outputs. Its structure may differ.
    - `fn`: `fn(model, batch)`, the forward pass of both models. It returns a pytree
        with floating-point arrays. If it also returns the activations of each layer,
        training needs far fewer steps. Set padding to zero. For a `FakeQuantized`, it
        receives the inner model with rounded weights.
    - `batches`: an iterable of batches for `fn`, with one step each.
    - `optimiser`: an `optax.GradientTransformation`, such as `optax.adam(1e-3)`.
    - `loss`: `loss(outputs, expected)`, a number. The default is the relative squared
        error of each output array, averaged over arrays.
    - `where`: the arrays to train, like a filter of `eqx.filter`: a function of an
        array, or a pytree prefix of bools. The default are all floating-point arrays.
    - `state`: the state to resume from, as another call returned it. `student` must
        then be the argument of that call, not its result.
    - `progress`: show a progress bar, which requires tqdm. The default shows it for
        large models in a terminal.

    **Returns:**

    The trained quantized model, and an [`eqquant.training.DistillationState`][]. For a
    `FakeQuantized`, the model is the result of `.quantized()`.

    **Raises:**

    - `ValueError` if there are no batches, if no array is trained, if `fn` returns no
        floating-point array, if its outputs for student and teacher have different
        shapes, if the loss or a trained array is not finite, or if `state` belongs to
        another student.
    - `TypeError` if `loss` does not return a real number.
    - `ImportError` if `progress=True` and tqdm is not installed.
    """
    order = "student, teacher, fn, batches, optimiser"
    check_forward(fn, teacher, batches, _caller, order)
    start = eqx.filter_eval_shape(DistillationState, student, optimiser, where=where)
    if not jax.tree.leaves(start.trained):
        raise ValueError(
            f"{_caller}: nothing is trained, because where selects no floating-point "
            "array of student. Scales in 8 bits are not trained."
        )
    now = DistillationState(student, optimiser, where=where) if state is None else state
    if _described(now) != _described(start):
        raise ValueError(
            f"{_caller}: state belongs to another student, where or optimiser. Pass "
            "the student of the first call, not its result."
        )
    loss = relative_error if loss is None else loss
    elements = sum(x.size for x in jax.tree.leaves(now.trained))
    for i, batch in each_batch(
        batches, elements, progress, caller=_caller, title="distilling"
    ):
        now, is_finite = _step(now, student, teacher, fn, loss, optimiser, batch)
        if not is_finite:
            raise ValueError(
                f"{_caller}: the loss and the trained arrays must stay finite, but "
                f"batch {i} has the loss {float(now.loss)}. Check that the "
                "batch is finite, or lower the learning rate."
            )
    return now.model(student), now


@eqx.filter_jit
def _step(state, student, teacher, fn, loss, optimiser, batch):
    expected = fn(_model(teacher), batch)

    def loss_of(trained):
        outputs = fn(_model(_put(trained, student)), batch)
        _check_outputs(outputs, expected)
        value = loss(outputs, expected)
        if not _is_number(value):
            raise TypeError(
                f"{_caller}: loss must return a real number, got {_kind(value)}."
            )
        return value

    value, gradients = eqx.filter_value_and_grad(loss_of)(state.trained)
    updates, optimiser_state = optimiser.update(
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


def _model(x: Any) -> Any:
    return x.fake_quantized() if isinstance(x, FakeQuantized) else x


def _put(trained: Any, student: Any) -> Any:
    """Return the student with the trained arrays, in the dtypes of the student."""

    def replace(new, old):
        return old if new is None else new.astype(old.dtype)

    return jax.tree.map(replace, trained, student, is_leaf=lambda x: x is None)


def _wide(x: Array) -> Array:
    return x.astype(wide_dtype(x.dtype))


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
