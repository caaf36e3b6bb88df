"""Counts of the values that low-precision products cannot represent."""

import collections
import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._jax import typed
from ..dispatch import substitute
from ..training import LowPrecisionArray
from ..trees import map_weights
from ._inspect import path_of


@dataclasses.dataclass(frozen=True)
class Saturation:
    """The rounding of one operand of the products with a weight.

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

    - `path`: the path of the weight in the arguments, such as `"layers.0.weight"`;
        empty for a weight in the closure of the function, and for all weights if the
        function combines several of them, for example in an average.
    - `shape`: `(outputs, inputs)` of the weight, or of each weight in a stack.
    - `product`: `"forward"`, `"dgrad"` or `"wgrad"`.
    - `operand`: `"activation"`, `"weight"` or `"gradient"`.
    - `spec`: the spec of the codes, such as `"float8_e4m3fn"`.
    - `values`: the number of rounded values.
    - `saturated`: the number of finite values beyond the largest number that their
        scale represents. They became this number.
    - `lost`: the number of values other than zero that became zero.
    - `not_finite`: the number of NaNs and infinities.
    """

    path: str
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

    One [`eqquant.debug.Saturation`][] for each operand of each product that ran. All
    weights of one stack count together.

    **Raises:**

    `ValueError` if no array among the arguments is in low precision.
    """
    watched = _Watched(_paths((args, kwargs)))
    watch = lambda leaf: map_weights(watched, leaf)
    call = substitute((fn, args, kwargs), watch, watch)
    if not watched.found:
        raise ValueError(
            "saturated: no array among the arguments is in low precision. Pass a model "
            "from `eqquant.training.low_precision`."
        )
    try:
        return watched.counts_of(*call)
    except (TypeError, ValueError):
        # Arrays of different paths have different structures, so a function cannot
        # map over both. An error of the function itself is raised again.
        watched = _Watched({})
        return watched.counts_of(*substitute((fn, args, kwargs), watch, watch))


class _Watched:
    """Counts the values of arrays in low precision, by their path."""

    def __init__(self, paths: dict[int, str]):
        self.paths, self.found = paths, False
        self.totals: dict[tuple, np.ndarray] = {}
        # One object for each path, because structures compare it.
        self.observer_of = ft.cache(lambda path: ft.partial(self.count, path))

    def __call__(self, leaf):
        if not isinstance(leaf, LowPrecisionArray):
            return leaf
        self.found = True
        observer = self.observer_of(self.paths.get(id(leaf), ""))
        return leaf.replace(recipe=dataclasses.replace(leaf.recipe, observer=observer))

    def count(self, path, label, values, counts):
        new = np.array([values, *counts], np.int64)
        self.totals[path, *label] = self.totals.get((path, *label), 0) + new

    def counts_of(self, fn, args, kwargs) -> tuple[Saturation, ...]:
        jax.block_until_ready(fn(*args, **kwargs))
        jax.effects_barrier()
        totals = self.totals
        return tuple(Saturation(*k, *map(int, totals[k])) for k in sorted(totals))


def _paths(arguments: tuple) -> dict[int, str]:
    """Return the path of each array in low precision, by its `id`.

    A copy of a whole argument inside of another, such as the moments of an optimiser,
    has the paths of the argument, because functions map over both.
    """
    is_leaf = lambda x: isinstance(x, LowPrecisionArray)
    leaves = jax.tree.leaves_with_path(arguments, is_leaf=is_leaf)
    found = [(keys, leaf) for keys, leaf in leaves if is_leaf(leaf)]
    below = collections.defaultdict(set)
    for keys, leaf in found:
        for n in range(2, len(keys) + 1):
            below[keys[:n]].add((keys[n:], leaf.shape))
    whole = {frozenset(below[keys[:2]]): keys[:2] for keys, _ in reversed(found)}

    def original(keys):
        for n in range(2, len(keys) + 1):
            argument = whole.get(frozenset(below[keys[:n]]))
            if argument is not None and argument != keys[:n]:
                return *argument, *keys[n:]
        return keys

    return {id(leaf): path_of(original(keys)) for keys, leaf in found}
