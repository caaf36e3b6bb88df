"""Lookups of rows in arrays whose rows are not the last axis."""

import eqquant
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_identical, strict
from jax import lax


ROWS, GRID = jnp.array([2, 0, 2]), jnp.array([[1, 3], [0, 0]])


def as_columns(w):
    numbers = lax.GatherDimensionNumbers((0,), (0,), (0,))
    return lax.gather(w, ROWS[:, None], numbers, (1, w.shape[1]))


# Each has a function that also runs without `quaxify`.
INDEXED = {
    "columns": ((4, 64), -1, lambda w: w.T[:, ROWS]),
    "grid of columns": ((4, 64), -1, lambda w: w.T[:, GRID]),
    "one column": ((4, 64), -1, lambda w: w.T[:, 3]),
    "first axis blocked": ((64, 4), 0, lambda w: w[:, ROWS]),
    "middle axis blocked": ((3, 64, 4), 1, lambda w: w[:, :, ROWS]),
    "two indices apart": ((3, 64, 4), 1, lambda w: w[ROWS, :, ROWS]),
    "number and index apart": ((3, 64, 4), 1, lambda w: w[1, :, ROWS]),
    "matrices": ((3, 64, 4), 1, lambda w: w[ROWS]),
    "new axis between": ((3, 4, 64), -1, lambda w: w[ROWS, None, ROWS]),
    "new axis after": ((4, 64), -1, lambda w: w[ROWS, :, None]),
    "slice beside": ((3, 64, 4), 1, lambda w: w[1:, :, ROWS]),
    "two blocked axes": ((8, 4, 8), (0, 2), lambda w: w[:, ROWS]),
}
OTHERS = {
    "take": ((4, 64), -1, lambda w: jnp.take(w.T, ROWS, axis=1)),
    "take, filled": (
        (4, 64),
        -1,
        lambda w: jnp.take(w.T, ROWS * 2, axis=1, mode="fill"),
    ),
    "mapped over features": (
        (4, 64),
        -1,
        lambda w: jax.vmap(lambda column: column[ROWS], in_axes=1)(w),
    ),
    "mapped index": ((64, 4), 0, lambda w: jax.vmap(lambda i: w[:, i])(ROWS)),
    "rows as columns": ((4, 64), -1, as_columns),
}


@pytest.mark.parametrize("name", INDEXED | OTHERS)
def test_lookups_decode_only_the_rows(name, normal):
    shape, axis, fn = (INDEXED | OTHERS)[name]
    q = eqquant.quantize(normal(*shape), "nf4", axis=axis)
    expected = fn(q.dequantize())
    assert_identical(eqquant.dequantize(strict(fn)(q)), expected)
    if name in INDEXED:  # A warning would be an error.
        assert_identical(eqquant.dequantize(fn(q)), expected)
