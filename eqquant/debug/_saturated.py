"""Counts of the values that low-precision products cannot represent."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._jax import typed
from ..dispatch import substitute
from ..training import LowPrecisionArray
from ..trees import map_weights


@dataclasses.dataclass(frozen=True)
class Saturation:
    """The rounding of one operand of the products with all weights of one shape.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import jax.numpy as jnp

        model = eqx.nn.Linear(64, 32, key=jax.random.key(0))
        model = eqquant.training.low_precision(model, "fp8")
        counts = eqquant.debug.saturated(lambda m, x: m(x), model, jnp.ones(64))
        assert {count.operand for count in counts} == {"activation", "weight"}
        assert all(count.spec == "float8_e4m3fn" for count in counts)
        ```

    **Fields:**

    - `shape`: `(outputs, inputs)` of the weights.
    - `product`: `"forward"`, `"dgrad"` or `"wgrad"`.
    - `operand`: `"activation"`, `"weight"` or `"gradient"`.
    - `spec`: the spec of the codes, such as `"float8_e4m3fn"`.
    - `values`: the number of rounded values.
    - `saturated`: the number of finite values beyond the largest number that their
        scale represents. They became this number.
    - `lost`: the number of values other than zero that became zero.
    - `not_finite`: the number of NaNs and infinities.
    """

    shape: tuple[int, int]
    product: str
    operand: str
    spec: str
    values: int
    saturated: int
    lost: int
    not_finite: int


@typed
def saturated(fn: Callable, *args: Any, **kwargs: Any) -> tuple[Saturation, ...]:
    """Run a training step, and count the values that its low-precision products cannot
    represent.

    Scales of int8, FP8 and MXFP8 are computed from the rounded values, so none of these
    saturates: a count above zero is a defect of the recipe. NVFP4 rounds scales to
    nearest, and a few of its values saturate. Values that are not finite make all
    results NaN that depend on them. A large share of lost gradients means that the spec
    has too small a range.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import jax.numpy as jnp

        model = eqx.nn.Linear(64, 32, key=jax.random.key(0))
        model = eqquant.training.low_precision(model, "fp8")
        gradient = eqx.filter_grad(lambda m, x: jnp.sum(jax.vmap(m)(x) ** 2))
        counts = eqquant.debug.saturated(gradient, model, jnp.ones((8, 64)))
        assert all(count.saturated == count.not_finite == 0 for count in counts)
        ```

    **Arguments:**

    - `fn`: a function, such as a training step or its gradient. It is compiled for this
        call. Rounding that `jax.checkpoint` repeats is counted twice.
    - `*args`, `**kwargs`: its arguments, on one device. The models among them are from
        [`eqquant.training.low_precision`][].

    **Returns:**

    One [`eqquant.debug.Saturation`][] for each operand of each product that ran, by
    the shape of the weight.

    **Raises:**

    `ValueError` if no array among the arguments is in low precision.
    """
    totals: dict[tuple, np.ndarray] = {}

    def observer(label, values, counts):
        new = np.array([values, *counts], np.int64)
        totals[label] = totals.get(label, 0) + new

    found = False

    def observed(leaf):
        nonlocal found
        if isinstance(leaf, LowPrecisionArray):
            found = True
            recipe = dataclasses.replace(leaf.recipe, observer=observer)
            return leaf.replace(recipe=recipe)
        return leaf

    watch = lambda leaf: map_weights(observed, leaf)
    fn, args, kwargs = substitute((fn, args, kwargs), watch, watch)
    if not found:
        raise ValueError(
            "saturated: no array among the arguments is in low precision. Pass a model "
            "from `eqquant.training.low_precision`."
        )
    jax.block_until_ready(fn(*args, **kwargs))
    jax.effects_barrier()
    return tuple(Saturation(*k, *map(int, totals[k])) for k in sorted(totals))
