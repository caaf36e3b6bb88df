"""Neural differential equations: gradients of a solver whose vector field is quantized.

`make test` does not install diffrax: run `make test-clients`.
"""

import functools as ft

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import dense, quantize_weights, relative, strict


diffrax = pytest.importorskip("diffrax")


@pytest.fixture
def field():
    field = eqx.nn.MLP(8, 8, 8, 1, activation=jnp.tanh, key=jax.random.key(0))
    return quantize_weights(field, "int8")


@pytest.fixture
def x():
    return jnp.linspace(-1, 1, 8)


def final(vector_field, args, x, adjoint, solver=None, **options):
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(vector_field),
        solver or diffrax.Heun(),
        t0=0.0,
        t1=1.0,
        dt0=0.5,
        y0=x,
        args=args,
        adjoint=adjoint,
        max_steps=8,
        **options,
    )
    return jnp.sum(solution.ys**2)


def solve(field, x, adjoint, **options):
    return final(lambda t, y, field: field(y), field, x, adjoint, **options)


def solve_over_closure(field, x, adjoint):
    return final(lambda t, y, args: field(y), None, x, adjoint)


def gradients(fn, field, x):
    """Return the gradients with respect to the state and the biases."""

    def loss(biases, x):
        where = lambda field: [layer.bias for layer in field.layers]
        return fn(eqx.tree_at(where, field, biases), x)

    return jax.jit(jax.grad(loss, (0, 1)))([layer.bias for layer in field.layers], x)


def check(fn, field, x, run=strict):
    expected = gradients(fn, dense(field), x)
    got = gradients(run(fn), field, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert relative(a, b) < 1e-4


ADJOINTS = {
    "checkpoints": lambda: diffrax.RecursiveCheckpointAdjoint(),
    "direct": lambda: diffrax.DirectAdjoint(),
    "backsolve": lambda: diffrax.BacksolveAdjoint(),
}


@pytest.mark.parametrize("name", ADJOINTS)
def test_gradients(name, field, x):
    check(ft.partial(solve, adjoint=ADJOINTS[name]()), field, x)


@pytest.mark.parametrize("name", ADJOINTS)
def test_gradients_from_inside(name, field, x):
    fn = ft.partial(solve, adjoint=ADJOINTS[name]())
    gradient = lambda field, x: jax.grad(fn, 1)(field, x)
    expected = eqx.filter_jit(gradient)(dense(field), x)
    assert relative(eqx.filter_jit(strict(gradient))(field, x), expected) < 1e-4


def test_second_derivatives(field, x):
    fn = ft.partial(solve, adjoint=diffrax.DirectAdjoint())
    expected = jax.jit(jax.hessian(ft.partial(fn, dense(field))))(x)
    assert (
        relative(jax.jit(jax.hessian(ft.partial(strict(fn), field)))(x), expected)
        < 1e-4
    )


def test_closures(field, x):
    check(
        ft.partial(solve_over_closure, adjoint=diffrax.RecursiveCheckpointAdjoint()),
        field,
        x,
    )
    backsolve = ft.partial(solve_over_closure, adjoint=diffrax.BacksolveAdjoint())
    with pytest.raises(ValueError, match="BacksolveAdjoint"):
        jax.grad(ft.partial(strict(backsolve), field))(x)


@pytest.mark.slow
def test_an_implicit_solver_decodes(field, x):
    fn = ft.partial(
        solve,
        adjoint=diffrax.RecursiveCheckpointAdjoint(),
        solver=diffrax.Kvaerno3(),
        stepsize_controller=diffrax.PIDController(1e-2, 1e-2),
    )
    check(fn, field, x, ft.partial(eqquant.quaxify, on_materialise="allow"))
    with pytest.raises(eqquant.MaterialiseError, match="linear_solve"):
        strict(fn)(field, x)


def steady(field, x, adjoint):
    """Return the steady state of the field with a decay."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: 0.3 * args[0](y) - y + args[1]),
        diffrax.Heun(),
        t0=0.0,
        t1=jnp.inf,
        dt0=0.1,
        y0=jnp.zeros(8),
        args=(field, x),
        adjoint=adjoint,
        event=diffrax.Event(diffrax.steady_state_event()),
        stepsize_controller=diffrax.PIDController(1e-5, 1e-6),
    )
    return jnp.sum(solution.ys**2)


@pytest.mark.slow
def test_a_steady_state_differentiated_implicitly(field, x):
    fn = ft.partial(steady, adjoint=diffrax.ImplicitAdjoint())
    loose = eqquant.quaxify(fn, on_materialise="allow")
    # Solves stop at different points, within their tolerances.
    run = lambda fn, field: jax.jit(jax.value_and_grad(ft.partial(fn, field)))(x)
    (value, got), (expected_value, expected) = run(loose, field), run(fn, dense(field))
    assert relative(value, expected_value) < 1e-4
    assert relative(got, expected) < 1e-3
    with pytest.raises(eqquant.MaterialiseError, match="linear_solve"):
        jax.grad(ft.partial(strict(fn), field))(x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["implicit solver", "steady state"])
def test_solver_around_plain_layers_decodes_nothing(kind, field, x):
    """Without `quaxify`, lineax receives codes and scales, and nothing is decoded."""
    adjoint, solver = diffrax.RecursiveCheckpointAdjoint(), diffrax.Kvaerno3()
    control = diffrax.PIDController(1e-2, 1e-2)
    how = {"adjoint": adjoint, "solver": solver, "stepsize_controller": control}
    fn = ft.partial(solve, **how)
    if kind == "steady state":
        fn = ft.partial(steady, adjoint=diffrax.ImplicitAdjoint())
    run = lambda field: jax.jit(jax.value_and_grad(ft.partial(fn, field)))(x)
    for got, expected in zip(run(field), run(dense(field)), strict=True):
        assert relative(got, expected) < 1e-3
