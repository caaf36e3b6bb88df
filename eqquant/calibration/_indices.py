"""A check of indices in calibration data."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental import checkify

from .._jax import warn


def index_check(fn: Callable, caller: str) -> Callable[[Any, Any, int], None]:
    """Return a function of the model, a batch and its number, which warns if
    `fn(model, batch)` reads out of bounds.

    JAX clamps an index, so that a token that is not in the vocabulary reads the last
    row of the table. The compiler removes everything that no index depends on.
    """

    @eqx.filter_jit
    def error_of(model, batch):
        def run():
            fn(model, batch)
            return jnp.zeros(())

        return checkify.checkify(run, errors=checkify.index_checks)()[0]

    def check(model, batch, number: int) -> None:
        if not any(map(_is_integer, jax.tree.leaves(batch))):
            return
        if message := error_of(model, batch).get():
            warn(
                f"{caller}: batches must only have indices in bounds, such as tokens "
                f"of the vocabulary, but fn reads out of bounds for batch {number}: "
                f"{message.strip()} JAX clamps the index or returns NaN.",
                UserWarning,
            )

    return check


def _is_integer(x: Any) -> bool:
    return eqx.is_array_like(x) and jnp.issubdtype(jnp.result_type(x), jnp.integer)
