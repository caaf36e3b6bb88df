"""The state of a distillation: trained arrays and the state of the optimiser."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._jax import typed
from ..formats import float_scales, PowerOfTwoScales, ShortScales
from ._fake_quantize import FakeQuantized
from ._kl_divergence import wide
from ._straight_through_array import straight_through_value


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
        because bfloat16 cannot represent small steps. Scales in 8, 6 or 4 bits are
        decoded.
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
        chosen = _map(lambda x: float_scales(x) if _is_short(x) else x, student)
        if where is not None:
            any_of = lambda x: any(jax.tree.leaves(x)) if _is_short(x) else x
            chosen = eqx.filter(chosen, _map(any_of, where))
        chosen = eqx.filter(chosen, eqx.is_inexact_array)
        self.trained = jax.tree.map(wide, chosen)
        self.optimiser_state = optimiser.init(self.trained)
        self.steps = jnp.zeros((), jnp.int32)
        self.loss = jnp.zeros((), jnp.float32)

    def model(self, student: Any) -> Any:
        """Return the quantized model in its current state.

        `student` is the argument of [`eqquant.training.distill`][].
        """

        def replace(new, old):
            if new is None:
                return old
            return old.nearest(new) if _is_short(old) else new.astype(old.dtype)

        out = _zip(replace, self.trained, student)
        return out.quantized() if isinstance(out, FakeQuantized) else out


def with_trained(trained: Any, student: Any) -> Any:
    """Return the student with the values of the trained arrays.

    Values equal the values of [`DistillationState.model`][]. Scales in few bits become
    floating-point arrays, whose gradients are straight-through estimates.
    """

    def replace(new, old):
        if new is None:
            return old
        if _is_short(old):
            rounded = float_scales(old.nearest(jax.lax.stop_gradient(new)))
            return straight_through_value(rounded, new)
        return new.astype(old.dtype)

    return _zip(replace, trained, student)


def _is_short(x: Any) -> bool:
    """Return whether scales are trained as decoded values. Powers of two are too coarse
    for small steps."""
    return isinstance(x, ShortScales) and not isinstance(x, PowerOfTwoScales)


def _map(fn: Callable, tree: Any) -> Any:
    return jax.tree.map(fn, tree, is_leaf=_is_short)


def _zip(fn: Callable, trained: Any, student: Any) -> Any:
    return jax.tree.map(fn, trained, student, is_leaf=lambda x: x is None)
