"""Structural operations that parts do not support: an error, or exact decoding."""

import eqquant
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_identical, strict
from jax import lax


ROWS = jnp.array([2, 0, 2])


CASES = {
    "split within blocks": lambda w: jnp.split(w, [32], -1),
    "looked up across blocks": lambda w: jnp.take(w, ROWS, axis=1),
    "rows of what is transposed": lambda w: jnp.take(w.T, ROWS, axis=0),
    "filled with a number": lambda w: jnp.take(
        w, jnp.array([1, 9]), axis=0, mode="fill", fill_value=7.0
    ),
    "beside floats": lambda w: jnp.stack([w, jnp.ones(w.shape)]),
    "one of two formats": lambda w: lax.select(
        jnp.array(True), w, eqquant.quantize(jnp.ones(w.shape), "int8").dequantize()
    ),
    "each value of one of two": lambda w: jnp.where(jnp.eye(4, 64) > 0, w, w[::-1]),
}


@pytest.mark.parametrize("name", CASES)
def test_decoded_or_refused(name, normal):
    fn, q = CASES[name], eqquant.quantize(normal(4, 64), "nf4")
    with pytest.raises(eqquant.MaterialiseError):
        strict(fn)(q)
    got = eqquant.quaxify(fn, on_materialise="allow")(q)
    assert_identical(got, fn(q.dequantize()))


def test_a_choice_between_two_formats(normal):
    """Both arrays are decoded, because no array has two formats."""
    a = eqquant.quantize(normal(4, 64), "nf4")
    b = eqquant.quantize(normal(4, 64), "int8")
    choose = lambda which, a, b: lax.select_n(which, a, b)
    with pytest.raises(eqquant.MaterialiseError):
        strict(choose)(jnp.array(1), a, b)
    got = eqquant.quaxify(choose, on_materialise="allow")(jnp.array(1), a, b)
    assert_identical(got, b.dequantize())
    same = strict(choose)(jnp.array(0), a, a.replace(scales=2 * a.scales))
    assert_identical(same, a)


def test_rows_of_one_element(normal):
    """A whole axis with one element can be squeezed."""
    q = eqquant.quantize(normal(4, 1), "int8")
    take = lambda w: jnp.take(w, jnp.array([0, 0]), axis=1)
    got = jax.jit(eqquant.quaxify(take, on_materialise="allow"))(q)
    assert_identical(got, take(q.dequantize()))
