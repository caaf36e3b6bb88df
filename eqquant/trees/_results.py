"""The error of the results of a whole model."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._jax import wide_dtype
from ._forward import each_batch


def results_error(
    fn: Callable, model: Any, original: Any, batches: Iterable, caller: str
) -> float:
    """Return the relative error of `fn(model, batch)` against `fn(original, batch)`.

    The norm covers all floating-point results of all batches.
    """

    @eqx.filter_jit
    def measure(model, original, batch):
        results = [float_arrays(fn(tree, batch)) for tree in (model, original)]
        square = lambda x: jnp.sum(jnp.square(jnp.abs(x.astype(wide_dtype(x.dtype)))))
        error = sum(square(a - b) for a, b in zip(*results, strict=True))
        return jnp.asarray(error), jnp.asarray(sum(map(square, results[1])))

    squares = [
        measure(model, original, batch)
        for _, batch in each_batch(batches, 0, False, caller=caller, title="measuring")
    ]
    error, norm = (sum(map(float, column)) for column in zip(*squares, strict=True))
    return math.sqrt(error / norm) if norm else (math.inf if error else 0.0)


def float_arrays(results: Any) -> list[Array]:
    """Return the floating-point arrays of a pytree."""
    return [x for x in jax.tree.leaves(results) if eqx.is_inexact_array(x)]
