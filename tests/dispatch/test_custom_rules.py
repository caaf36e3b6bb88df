"""Derivative rules that depend on the differentiated arguments, like Equinox's
loops."""

import functools as ft

import eqquant
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import pytest
from helpers import dense, quantize_weights, relative, strict
from jax.custom_derivatives import custom_vjp_primal_tree_values, SymbolicZero


loose = ft.partial(eqquant.quaxify, on_materialise="allow")


@pytest.fixture
def model():
    model = eqx.nn.MLP(8, 8, 8, 1, activation=jnp.tanh, key=jax.random.key(0))
    return quantize_weights(model, "int8")


@pytest.fixture
def x():
    return jnp.linspace(-1, 1, 8)


@pytest.fixture
def w(normal):
    return eqquant.quantize(normal(8, 8) / 3, "int8")


def loop(kind, **options):
    def fn(step, x):
        carry = eqxi.while_loop(
            lambda carry: (carry[0] < 3) & (jnp.sum(step(carry[1])) < 1e3),
            lambda carry: (carry[0] + 1, carry[1] + 0.3 * step(carry[1])),
            (0, x),
            kind=kind,
            max_steps=4,
            **options,
        )
        return jnp.sum(carry[1] ** 2)

    return fn


def scan(step, x):
    body = lambda x, y: (x + 0.3 * y * step(x), x)
    ys = jnp.arange(3.0)
    last, ys = eqxi.scan(body, x, ys, kind="checkpointed", checkpoints=2)
    return jnp.sum(last**2) + jnp.sum(ys)


LOOPS = {
    "checkpointed": loop("checkpointed"),
    "checkpointed, few": loop("checkpointed", checkpoints=1),
    "bounded": loop("bounded", base=2),
    "scan": scan,
}


def gradient(fn, step, x):
    return jax.jit(jax.grad(ft.partial(fn, step)))(x)


SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in LOOPS if n != "checkpointed"]


@pytest.mark.parametrize("name", ["checkpointed", *SLOW])
def test_gradients_of_equinox_loops(name, model, x):
    fn = LOOPS[name]
    expected = gradient(fn, dense(model), x)
    outside = jax.jit(jax.grad(lambda x: strict(fn)(model, x)))(x)
    assert relative(outside, expected) < 1e-4
    inside = jax.jit(lambda x: strict(jax.grad(fn, 1))(model, x))(x)
    assert relative(inside, expected) < 1e-4


@pytest.mark.slow
def test_gradients_of_biases(model, x):
    fn = LOOPS["checkpointed"]
    with_bias = lambda m, b: eqx.tree_at(lambda m: m.layers[0].bias, m, b)
    bias = model.layers[0].bias
    expected = jax.jit(jax.grad(lambda b: fn(with_bias(dense(model), b), x)))(bias)
    outside = jax.jit(jax.grad(lambda b: strict(fn)(with_bias(model, b), x)))(bias)
    assert relative(outside, expected) < 1e-4


@pytest.mark.slow
def test_gradients_under_vmap(model, x):
    fn = LOOPS["checkpointed"]
    expected = gradient(fn, dense(model), x)
    xs = jnp.stack([x, -x])
    mapped = jax.jit(jax.vmap(jax.grad(lambda x: strict(fn)(model, x))))(xs)
    assert relative(mapped[0], expected) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["checkpointed", pytest.param("bounded", marks=pytest.mark.slow)]
)
def test_second_derivatives_of_equinox_loops(name, model, x):
    fn = LOOPS[name]
    expected = jax.jit(jax.hessian(ft.partial(fn, dense(model))))(x)
    got = jax.jit(jax.hessian(lambda x: strict(fn)(model, x)))(x)
    assert relative(got, expected) < 1e-4


def test_what_equinox_cannot_differentiate_is_its_own_error(model, x):
    fn = LOOPS["checkpointed"]
    for step, run in (dense(model), lambda fn: fn), (model, strict):
        with pytest.raises(TypeError, match="forward-mode"):
            jvp = ft.partial(jax.jvp, ft.partial(run(fn), step))
            jax.jit(jvp).lower((x,), (x,))


#
# Decoding of weights
#


def steps(w, x):
    body = lambda x: jnp.tanh(w @ x)
    return loop("checkpointed")(body, x)


def check_gradients(array, x):
    trained, rest = eqx.partition(array, eqx.is_inexact_array)
    loss = lambda fn, t, x: fn(eqx.combine(t, rest), x)
    plain = lambda q, x: steps(q.dequantize(), x)
    expected = jax.jit(jax.grad(ft.partial(loss, plain), (0, 1)))(trained, x)
    got = jax.jit(jax.grad(ft.partial(loss, loose(steps)), (0, 1)))(trained, x)
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    for a, b in leaves:
        assert jnp.linalg.norm(b) > 0
        assert relative(a, b) < 1e-3  # 15-bit activations.
    with pytest.raises(eqquant.MaterialiseError):
        jax.eval_shape(jax.grad(ft.partial(loss, strict(steps))), trained, x)


@pytest.mark.slow
def test_scales_get_the_gradient_of_a_rule(w, x):
    check_gradients(w, x)


@pytest.mark.slow
def test_adapters_get_the_gradient_of_a_rule(w, x):
    key = jax.random.key(1)
    tuned = eqquant.lora_tree({"w": w}, 2, key=key, min_size=0, where=lambda _: True)
    moved = jax.tree.map(
        lambda a: a + 0.1 if eqx.is_inexact_array(a) and 2 in a.shape else a, tuned
    )
    check_gradients(moved["w"], x)


def test_a_rule_is_told_what_is_differentiated(w, x):
    seen = []

    @jax.custom_vjp
    def product(x, y, w):
        return w @ x, y

    def forward(x, y, w):
        seen.append([x.perturbed, y.perturbed, w.perturbed])
        x, y, w = custom_vjp_primal_tree_values((x, y, w))
        return (w @ x, y), w

    def backward(w, cotangents):
        seen.append([isinstance(ct, SymbolicZero) for ct in cotangents])
        return 3 * cotangents[0] @ w, None, None

    product.defvjp(forward, backward, symbolic_zeros=True)
    loss = lambda x: jnp.sum(strict(product)(x, x, w)[0])
    assert relative(jax.grad(loss)(x), 3 * jnp.ones(8) @ w.dequantize()) < 1e-4
    assert seen == [[True, True, False], [False, True]]
    seen.clear()
    jax.grad(lambda y: jnp.sum(strict(product)(x, y, w)[0]))(x)
    assert seen == [[False, True, False], [False, True]]


def test_a_rule_without_symbolic_zeros_gets_zeros(w, x):
    @jax.custom_vjp
    def both(x, n, w):
        return w @ x, w.T @ x, n

    both.defvjp(
        lambda x, n, w: (both(x, n, w), w),
        lambda w, cts: (cts[0].at[0].add(1.0) @ w + cts[1].at[0].add(1.0), None, None),
    )
    got = jax.grad(lambda x: jnp.sum(strict(both)(x, 3, w)[0]))(x)
    expected = jnp.ones(8).at[0].add(1.0) @ w.dequantize() + jnp.zeros(8).at[0].add(1.0)
    assert relative(got, expected) < 1e-4


def test_the_gradient_of_a_quantized_result(w, x):
    @jax.custom_vjp
    def product(x, w):
        return w @ x, w

    product.defvjp(lambda x, w: (product(x, w), w), lambda w, ct: (2 * ct[0] @ w, None))
    unused = lambda x, w: jnp.sum(product(x, w)[0])
    expected = jax.grad(unused)(x, w.dequantize())
    got = jax.grad(lambda x: strict(unused)(x, w))(x)
    assert relative(got, expected) < 1e-4

    def used(x, w):
        y, w = product(x, w)
        return jnp.sum(w @ y)

    expected = jax.grad(used)(x, w.dequantize())
    assert relative(strict(jax.grad(used))(x, w), expected) < 1e-3
    with pytest.raises(NotImplementedError, match="stop_gradient"):
        jax.grad(lambda x: strict(used)(x, w))(x)


@pytest.mark.parametrize("symbolic_zeros", [True, False])
def test_a_jvp_rule_that_returns_a_weight(symbolic_zeros, w, x):
    @jax.custom_jvp
    def same(x, w):
        return x, w

    def jvp(primals, tangents):
        zeros = [isinstance(t, SymbolicZero) for t in tangents]
        assert zeros == [False, symbolic_zeros]
        return primals, tangents

    same.defjvp(jvp, symbolic_zeros=symbolic_zeros)

    def fn(x, w):
        x, w = same(x, w)
        return jnp.sum(w @ x)

    expected = jax.grad(fn)(x, w.dequantize())
    run = strict if symbolic_zeros else loose
    assert relative(jax.grad(lambda x: run(fn)(x, w))(x), expected) < 1e-4


def test_a_rule_that_closes_over_a_weight(w, x):
    def fn(w, x):
        @jax.custom_vjp
        def product(x):
            return w @ x

        product.defvjp(lambda x: (w @ x, None), lambda _, ct: (ct @ w,))
        return jnp.sum(product(x))

    assert relative(strict(fn)(w, x), fn(w.dequantize(), x)) < 1e-3
    with pytest.raises(ValueError, match="must be an argument"):
        jax.grad(lambda x: strict(fn)(w, x))(x)
    inside = strict(jax.grad(fn, 1))(w, x)
    assert relative(inside, jnp.ones(8) @ w.dequantize()) < 1e-4
