"""`observe_rows` and `observe_product`: identities whose gradients are statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.primitives import observe_product, observe_rows
from helpers import assert_identical


# Small integers, so that float32 sums are exact.
STACK, ROWS, SIZE = 2, 5, 4


def integers(*shape):
    return np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32)


def cotangents(*lead):
    ct = integers(*lead, ROWS, SIZE)
    ct[..., 1, :] = 0  # A row without influence.
    return ct


def zeros(*lead):
    return (jnp.zeros((*lead, SIZE, SIZE)), jnp.zeros(lead), jnp.zeros(lead))


def sums(ct, over):
    """Return the sums in NumPy, over the axes `over` before the rows."""
    gram = np.einsum("...ri,...rj->...ij", ct, ct).sum(over)
    count = (ct != 0).any(-1).sum(-1).astype(np.float32).sum(over)
    return gram, count, (ct**2).sum((-1, -2)).sum(over)


def check(fn, x, seen, ct, over=()):
    """Check that values and cotangents of `x` are unchanged, and others are sums."""
    value, pull = jax.vjp(jax.jit(fn), x, *seen)
    assert_identical(value, x)
    of_x, *of_seen = jax.jit(pull)(jnp.asarray(ct))
    np.testing.assert_array_equal(of_x, ct)
    for got, expected in zip(of_seen, sums(ct, over), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("lead", [(), (STACK,)], ids=["one", "a stack"])
def test_sums_over_rows(lead):
    ct = cotangents(*lead)
    assert sums(ct, ())[1].max() == ROWS - 1
    check(observe_rows, jnp.asarray(integers(*lead, ROWS, SIZE)), zeros(*lead), ct)


def test_sums_over_mapped_axes():
    """Nested maps, and maps over other axes, also sum."""
    x, ct = jnp.asarray(integers(3, 2, ROWS, SIZE)), cotangents(3, 2)
    inner = jax.vmap(observe_rows, (0, None, None, None))
    check(jax.vmap(inner, (0, None, None, None)), x, zeros(), ct, (0, 1))
    from_last = jax.vmap(inner, (2, None, None, None), 2)
    moved = lambda a: np.moveaxis(a, 0, 2)
    value, pull = jax.vjp(from_last, jnp.moveaxis(x, 0, 2), *zeros())
    assert_identical(value, jnp.moveaxis(x, 0, 2))
    for got, expected in zip(pull(moved(ct))[1:], sums(ct, (0, 1)), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("lead", [(), (STACK,)], ids=["one", "a stack"])
def test_what_is_mapped_may_have_sums_of_its_own(lead):
    x, ct = jnp.asarray(integers(3, *lead, ROWS, SIZE)), cotangents(3, *lead)
    check(jax.vmap(observe_rows), x, zeros(3, *lead), ct)
    # Inside of a map without a mapped operand.
    xs, cts = jnp.stack([x, 2 * x]), np.stack([ct, 2 * ct])
    shared = jax.vmap(jax.vmap(observe_rows), (0, None, None, None))
    check(shared, xs, zeros(3, *lead), cts, (0,))


def test_rows_may_be_the_same_for_several_sums():
    x, ct = jnp.asarray(integers(ROWS, SIZE)), cotangents(3)
    fn = jax.vmap(observe_rows, (None, 0, 0, 0))
    value, pull = jax.vjp(fn, x, *zeros(3))
    assert_identical(value, jnp.stack([x] * 3))
    of_x, *of_seen = pull(jnp.asarray(ct))
    np.testing.assert_array_equal(of_x, ct.sum(0))
    for got, expected in zip(of_seen, sums(ct, ()), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_rows_alone_may_be_differentiated():
    x, ct = jnp.asarray(integers(ROWS, SIZE)), cotangents()
    _, pull = jax.vjp(lambda x: observe_rows(x, *zeros()), x)
    np.testing.assert_array_equal(pull(jnp.asarray(ct))[0], ct)


def sums_of_inputs(x, ct, every_row):
    """Return the sums of `observe_product` in NumPy."""
    is_counted = np.ones(ROWS, bool) if every_row else (ct != 0).any(-1)
    x = x * is_counted[:, None]
    return x.T @ x, is_counted.sum(), (ct**2).sum(), np.abs(x).max(-1).sum()


@pytest.mark.parametrize("every_row", [False, True])
def test_sums_over_the_inputs_of_a_product(every_row):
    out, ct = jnp.asarray(integers(ROWS, 3)), cotangents()[:, :3]
    x = jnp.asarray(2 * integers(ROWS, SIZE))
    fn = lambda out, *seen: observe_product(out, x, *seen, every_row=every_row)
    value, pull = jax.vjp(jax.jit(fn), out, *zeros(), jnp.zeros(()))
    assert_identical(value, out)
    of_out, *of_seen = jax.jit(pull)(jnp.asarray(ct))
    np.testing.assert_array_equal(of_out, ct)
    expected = sums_of_inputs(np.asarray(x), ct, every_row)
    for got, wanted in zip(of_seen, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("every_row", [False, True])
def test_tangents_of_mapped_products_are_unchanged(every_row):
    out, x = integers(2, ROWS, 3), integers(2, ROWS, SIZE)
    seen = *zeros(), jnp.zeros(())

    def forward(out, x, tangent):
        fn = lambda out: observe_product(out, x, *seen, every_row=every_row)
        return jax.jvp(fn, (out,), (tangent,))

    value, changed = jax.vmap(forward)(out, x, 2 * out)
    assert_identical(value, out)
    np.testing.assert_array_equal(changed, 2 * out)


def test_upper_triangle_of_a_large_gram_in_blocks():
    size = 2100
    ct = integers(3, size)
    seen = jnp.zeros((size, size)), jnp.zeros(()), jnp.zeros(())
    _, pull = jax.vjp(lambda *seen: observe_rows(jnp.asarray(ct), *seen), *seen)
    gram, *_ = pull(jnp.asarray(ct))
    np.testing.assert_array_equal(np.triu(gram), np.triu(ct.T @ ct))
    assert not np.any(gram[size // 2 :, : size // 2]), "blocks below are left out"


def test_the_same_inputs_in_a_scan_are_summed_once():
    x, out = jnp.asarray(integers(ROWS, SIZE)), jnp.asarray(integers(ROWS, 3))

    def fn(*seen):
        def layer(x, seen):
            parts = [observe_product(out, x, *one, every_row=True) for one in seen]
            return x + jnp.sum(parts[0]) + jnp.sum(parts[1]), None

        return jnp.sum(jax.lax.scan(layer, x, seen)[0])

    one = *map(lambda part: jnp.stack([part] * 2), zeros()), jnp.zeros(2)
    grad = jax.jit(jax.grad(fn, (0, 1)))
    compiled = grad.lower(one, one).compile().as_text()
    assert compiled.count(f" = f32[{SIZE},{SIZE}]{{1,0}} dot(") == 1, compiled
