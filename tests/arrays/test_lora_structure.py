"""Structural operations of weights with adapters, on all parts."""

from typing import Any, cast

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import is_lora
from eqquant.arrays import Contraction, LoraArray
from helpers import relative, slow, strict
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P


STACK, OUT, SIZE = 3, 4, 64
# The base is exact. The adapter is a product in float32.
ROUNDING = 1e-6

MOVES = {
    "backwards": lambda w: jnp.flip(w, 1),
    "the stack backwards": lambda w: w[::-1],
    "looked up in the stack": lambda w: w[jnp.array([2, 0, 2])],
    "a part of the stack": lambda w: w[1:],
    "put together": lambda w: jnp.concatenate([w, w[:1]]),
    "stacked": lambda w: jnp.stack([w, w]),
    "outputs in two axes": lambda w: w.reshape(STACK, 2, OUT // 2, SIZE),
    "the stack in two axes": lambda w: w[:2].reshape(2, 1, OUT, SIZE),
    "one axis more": lambda w: w[:, None],
    "copies": lambda w: jnp.broadcast_to(w, (2, STACK, OUT, SIZE)),
    "contracted first": lambda w: jnp.transpose(w, (2, 0, 1)),
    "scaled by output": lambda w: w * jnp.arange(1.0, OUT + 1)[:, None],
    "scaled by matrix": lambda w: w / jnp.arange(1.0, STACK + 1)[:, None, None],
    "chosen": lambda w: lax.cond(w.size > 1, lambda w: w, lambda w: w[::-1], w),
}


def make(format):
    """Return a stack with an adapter for each matrix."""
    rng = np.random.default_rng(0)
    shapes = (STACK, OUT, SIZE), (STACK, 2, SIZE), (STACK, OUT, 2)
    normal = lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    base, a, b = map(normal, shapes)
    base = base if format is None else eqquant.quantize(base, format)
    return LoraArray(base, a, b, None, 0.5, 0.0, (-1,), (-2,))


# JAX moves floats.
@pytest.fixture(scope="module", params=[slow(None), "nf4"], ids=str)
def weight(request):
    return make(request.param)


@pytest.mark.parametrize("name", MOVES)
def test_moves(name, weight):
    """Values and products after an operation are correct."""
    move = strict(MOVES[name])
    got, dense = move(weight), np.asarray(weight.dequantize())
    expected = np.asarray(MOVES[name](jnp.asarray(dense)), np.float64)
    assert is_lora(got) and got.shape == expected.shape
    assert relative(got.dequantize(), expected) < ROUNDING
    (axis,) = got.in_axes
    x = np.random.default_rng(1).standard_normal((2, SIZE)).astype(np.float32)
    out = got.contract(
        jnp.asarray(x), Contraction([(axis + got.ndim, 1)], precision="highest")
    )
    product = np.tensordot(np.float64(x), expected, (1, axis))
    assert relative(out, product) < 1e-4  # 15-bit activations.


def test_a_factor_for_each_input():
    """A factor per input scales a float base. A blocked base does not support it."""
    factor = jnp.linspace(1.0, 2.0, SIZE)
    scale = strict(lambda w: w * factor)
    with pytest.raises(eqquant.MaterialiseError):
        scale(make("nf4")[1])
    matrix = cast(Any, make(None)[1])
    got = scale(matrix)
    expected = np.asarray(matrix.dequantize(), np.float64) * np.float64(factor)
    assert is_lora(got) and relative(got.dequantize(), expected) < ROUNDING
    np.testing.assert_array_equal(got.b, matrix.b)


def test_what_cannot_be_kept_in_parts(weight, normal):
    """The results of these operations are not a base plus an adapter."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    full = normal(STACK, OUT, SIZE)
    matrix = weight[0]
    for out in (
        weight.with_shape((STACK * OUT, SIZE)),
        weight.with_shape((STACK, OUT * SIZE)),
        weight.concatenate([weight], 1),
        weight.concatenate([weight], 2),
        weight.scale_parts(full, lax.mul),
    ):
        assert out is NotImplemented
    empty = matrix.slice((0, 0), (0, SIZE))
    assert empty.shape == (0, SIZE)
    assert empty.with_shape((0, 1, SIZE)) is NotImplemented
    if eqquant.is_quantized(weight.base):
        assert weight.slice((0, 0, 3), (STACK, OUT, SIZE)) is NotImplemented
        assert weight.split_specs(P(None, None, "x"), mesh) is NotImplemented
    # Lookups of rows leave the last axes whole.
    assert matrix.T.whole_axes is None
    rows = jnp.array([3, 0])
    with pytest.warns(eqquant.arrays.MaterialiseWarning):
        got = matrix.T[rows]
    assert relative(got, matrix.dequantize().T[rows]) < ROUNDING


def test_a_vector_times_integers_is_no_product(weight):
    matrix, x = weight[0], jnp.arange(SIZE)
    assert (
        matrix.contract(x, Contraction([(1, 0)], out_dtype=jnp.int32)) is NotImplemented
    )
    expected = np.asarray(matrix.dequantize(), np.float64) @ np.arange(SIZE)
    assert relative(matrix @ x, expected) < 1e-4
