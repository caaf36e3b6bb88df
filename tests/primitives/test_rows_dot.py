"""`rows_dot`: `x @ w.T` under maps, derivatives, and explicit meshes."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.primitives import rows_dot
from helpers import pairs, relative
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


# Products in float32.
EXACT = 1e-6

dot = ft.partial(rows_dot, precision="highest")


@pairs("axes, rows", [(None, None), (0, None), (None, 1), (1, 0), (0, 2)], [3, 17])
def test_values_and_gradients(axes, rows, normal):
    """Mapped results equal separate results, for tall and wide matrices."""
    x, w, ct = normal(5, 8), normal(rows, 8), normal(5, rows)
    # Different copies along the mapped axis.
    several = lambda a, axis: a if axis is None else jnp.stack([a, 2 * a, a - 1], axis)
    one = lambda a, axis, i: np.float64(a if axis is None else jnp.take(a, i, axis))
    x_axis, w_axis = axes
    xs, ws = several(x, x_axis), several(w, w_axis)
    is_mapped = axes != (None, None)
    mapped = jax.vmap(dot, axes) if is_mapped else dot
    value, pull = jax.vjp(jax.jit(mapped), xs, ws)
    weights = (1.0, 3.0, -2.0)[: 3 if is_mapped else 1]
    cts = np.stack([c * np.asarray(ct) for c in weights])
    of_x, of_w = pull(jnp.asarray(cts if is_mapped else cts[0]))
    all_x, all_w = [], []
    for i, factor in enumerate(weights):
        x_i, w_i, ct_i = one(xs, x_axis, i), one(ws, w_axis, i), factor * np.float64(ct)
        assert relative(value[i] if is_mapped else value, x_i @ w_i.T) < EXACT
        all_x.append(ct_i @ w_i)
        all_w.append(ct_i.T @ x_i)
    # A shared operand receives the sum.
    for got, each, axis in ((of_x, all_x, x_axis), (of_w, all_w, w_axis)):
        assert (
            relative(got, sum(each) if axis is None else np.stack(each, axis)) < EXACT
        )


# The mesh axes of the rows of `x` and `w`, of the contracted axis, and of the result.
SPLIT = {
    "nowhere": (P(None, None), P(None, None), P(None, None)),
    "rows of both": (P("a", None), P("b", None), P("a", "b")),
    "both over one axis": (P("a", None), P("a", None), P("a", None)),
    "what is contracted": (P("a", None), P(None, "b"), P("a", None)),
    "contracted as the rows are": (P("a", None), P("b", "a"), P("a", "b")),
}


@pytest.mark.parametrize("name", SPLIT)
def test_explicit_meshes(name, normal):
    x, w, ct = normal(4, 8), normal(16, 8), normal(4, 16)
    x_spec, w_spec, expected = SPLIT[name]
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        xs = jax.device_put(x, NamedSharding(mesh, x_spec))
        ws = jax.device_put(w, NamedSharding(mesh, w_spec))
        value, pull = jax.vjp(jax.jit(dot), xs, ws)
        assert jax.typeof(value).sharding.spec == expected
        cts = jax.device_put(ct, NamedSharding(mesh, expected))
        of_x, of_w = jax.jit(pull)(cts)
    x, w, ct = map(np.float64, (x, w, ct))
    assert relative(value, x @ w.T) < EXACT
    assert relative(of_x, ct @ w) < EXACT
    assert relative(of_w, ct.T @ x) < EXACT
