"""`ObservedArray`: it behaves like its weight, and its gradient has statistics."""

import math

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.arrays import Contraction
from eqquant.calibration.observed import Observed, ObservedArray
from helpers import relative
from jax.sharding import PartitionSpec as P


# Sums of products in float32.
EXACT = 1e-6
STACK, OUT, SIZE, ROWS = 3, 4, 8, 5


def observed(w, inputs=(-1,), stack=(), **options) -> ObservedArray:
    size = math.prod(w.shape[axis] for axis in inputs)
    sums = Observed.zeros([w.shape[axis] for axis in stack], size, jnp.float32)
    return ObservedArray(w, sums, sums, inputs, stack, **options)


def seen_by(fn, q):
    """Return the result of a function, and the statistics of products and lookups for a
    cotangent of ones."""
    sums_of = lambda q: (q.products, q.lookups)

    def total(sums):
        out = fn(eqx.tree_at(sums_of, q, sums))
        return jnp.sum(out), out

    sums, out = jax.jit(jax.grad(total, has_aux=True))(sums_of(q))
    return out, jax.tree.map(jnp.add, *sums)


def product(w, x):
    """Contract `x` with the contracted axis at its new position."""
    (axis,) = w.blocked_axes
    return w.contract(x, Contraction([(axis, 1)]))


#
# Structural operations on a stack of matrices before products
#

# The number of products of each matrix in the stack.
MOVES = {
    "as it is": (lambda w: w, (1, 1, 1)),
    "another order": (lambda w: w.transpose(1, 0, 2), (1, 1, 1)),
    "contracted first": (lambda w: w.transpose(2, 0, 1), (1, 1, 1)),
    "a part of the stack": (lambda w: w[1:], (0, 1, 1)),
    "every other one": (lambda w: w[::2], (1, 0, 1)),
    "one of them": (lambda w: w[1], (0, 1, 0)),
    "looked up": (lambda w: w[np.array([2, 0, 2])], (1, 0, 2)),
    "some outputs": (lambda w: w[:, 1:3], (1, 1, 1)),
    "one axis more": (lambda w: w[:, None], (1, 1, 1)),
    "and less": (lambda w: w[:, None].squeeze((1,)), (1, 1, 1)),
    "reshaped": (lambda w: w.reshape(1, STACK, OUT, SIZE), (1, 1, 1)),
    "copies": (lambda w: jnp.broadcast_to(w, (2, STACK, OUT, SIZE)), (1, 1, 1)),
    "backwards": (lambda w: jnp.flip(w, 1), (1, 1, 1)),
    "scaled": (lambda w: w * np.arange(1.0, OUT + 1)[:, None], (1, 1, 1)),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves_before_a_product(name, normal):
    move, counts = MOVES[name]
    w, x = normal(STACK, OUT, SIZE), normal(ROWS, SIZE)
    move = eqquant.quaxify(move, on_materialise="error")
    out, seen = seen_by(lambda w: product(move(w), x), observed(w, stack=(-3,)))
    dense = np.asarray(move(w), np.float64)
    axis = 0 if name == "contracted first" else -1
    expected = np.tensordot(np.float64(x), dense, (1, axis))
    assert relative(out, expected) < EXACT
    rows = np.asarray(x, np.float64)
    gram = rows.T @ rows
    for i, count in enumerate(counts):
        error = np.abs(np.asarray(seen.gram[i]) - count * gram).max()
        assert error <= EXACT * gram.max()
    assert seen.rows.tolist() == [ROWS * count for count in counts]
    outs = expected.size // ROWS // sum(counts)
    np.testing.assert_array_equal(seen.power, seen.rows * outs)


def test_unsupported_operations_warn(normal):
    """Unsupported operations decode the array with a warning."""
    stack = observed(normal(STACK, OUT, SIZE), stack=(-3,))
    single = observed(normal(1, OUT, SIZE), stack=(-3,))
    assert single.with_shape((1, OUT, SIZE)).inputs == (-1,)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for out in (
        stack.with_shape((STACK * OUT, SIZE)),
        stack.with_shape((STACK, OUT, 2, SIZE // 2)),
        single.with_shape((OUT, SIZE)),
        single.broadcast_in_dim((STACK, OUT, SIZE), (0, 1, 2)),
        stack.slice((0, 0, 1), (STACK, OUT, SIZE)),
        stack.dynamic_slice((0, 0, 0), (STACK, OUT, 2)),
        stack.reverse((0,)),
        stack.reverse((2,)),
        stack.concatenate([stack], 0),
        stack.split_specs(P("x"), mesh),
    ):
        assert out is NotImplemented
    with pytest.warns(eqquant.arrays.MaterialiseWarning):
        part = stack[..., :3]
    np.testing.assert_array_equal(part, stack.base[..., :3])
    assert stack.astype(jnp.bfloat16).dtype == jnp.bfloat16
    assert not stack.rounds_activations


#
# Lookups of rows
#

LOOKUPS = {
    "an array": lambda w, rows: w[rows],
    "the dispatcher": eqquant.quaxify(lambda w, rows: jnp.take(w, rows, axis=0)),
    "mapped over": lambda w, rows: jax.vmap(lambda row: w[row])(rows),
    "a scan": lambda w, rows: jax.lax.scan(lambda _, row: (0, w[row]), 0, rows)[1],
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_the_gradient_of_looked_up_rows_is_seen(name, normal):
    w, factors = normal(16, SIZE), normal(ROWS, SIZE)
    rows = jnp.array([3, 15, 3, 0, 7])
    look_up = lambda q: LOOKUPS[name](q, rows) * factors
    out, seen = seen_by(look_up, observed(w))
    np.testing.assert_array_equal(out, w[rows] * factors)
    ct = np.asarray(factors, np.float64)
    assert relative(seen.gram, ct.T @ ct) < EXACT
    assert seen.rows == ROWS
    assert relative(seen.power, (ct**2).sum()) < EXACT


def test_rows_along_the_contracted_axis_are_not_observed(normal):
    """They are not observed, and their values are correct."""
    w, rows = normal(16, SIZE), np.array([3, 1])
    q = observed(w, inputs=(-2,))
    assert q.whole_axes is None
    with pytest.warns(eqquant.arrays.MaterialiseWarning):
        out, seen = seen_by(lambda w: w[rows], q)
    np.testing.assert_array_equal(out, w[rows])
    assert not jnp.any(seen.gram) and seen.rows == 0


def test_products_of_another_kind_are_not_seen(normal):
    w, y = normal(OUT, SIZE), normal(ROWS, OUT)
    out, seen = seen_by(lambda w: y @ w, observed(w))
    expected = np.asarray(y, np.float64) @ np.asarray(w, np.float64)
    assert relative(out, expected) < EXACT
    assert not jnp.any(seen.gram) and seen.rows == 0 and seen.power == 0


@pytest.mark.parametrize("every_row", [False, True])
def test_rows_on_which_nothing_depends(every_row, normal):
    w, x = normal(OUT, SIZE), normal(ROWS, SIZE)
    counts = np.array([1, 0, 1, 1, 0])
    fn = lambda w: (x @ w.T) * counts[:, None]
    _, seen = seen_by(fn, observed(w, every_row=every_row))
    left = np.asarray(x if every_row else x[counts == 1], np.float64)
    assert relative(seen.gram, left.T @ left) < EXACT
    assert seen.rows == len(left) and seen.power == 3 * OUT
