"""Second derivatives of products, by derivatives of the gradient for scales."""

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Int8, NF4
from eqquant.primitives._scale_gradient import scale_gradient, ScaleGradient
from helpers import relative
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P


# One block per row, several blocks, and a stack of matrices.
ROWS, SIZE, BLOCK = 6, 128, 64
# Float32 products of at most 128 terms.
EXACT = 2e-6


def levels_of(q):
    """Return the levels in float64: values divided by the scale of their block."""
    scales = np.repeat(np.asarray(q.scales, np.float64), BLOCK, -1)
    return np.asarray(q.dequantize(), np.float64) / scales


def of_blocks(of_values):
    *lead, size = of_values.shape
    return of_values.reshape(*lead, size // BLOCK, BLOCK).sum(-1)


def expected(q, x, x_dot, scales_dot):
    """Return the derivatives of the gradients of `sum(sin(x @ w.T))`."""
    levels = levels_of(q)
    w = np.asarray(q.dequantize(), np.float64)
    x, x_dot = np.asarray(x, np.float64), np.asarray(x_dot, np.float64)
    w_dot = levels * np.repeat(np.asarray(scales_dot, np.float64), BLOCK, -1)
    y, y_dot = x @ w.T, x_dot @ w.T + x @ w_dot.T
    ct, ct_dot = np.cos(y), -np.sin(y) * y_dot
    of_x = ct_dot @ w + ct @ w_dot
    return of_x, of_blocks((ct_dot.T @ x + ct.T @ x_dot) * levels)


def make(normal, make_format, *shape):
    format = make_format(block_size=BLOCK)
    return eqquant.quantize(normal(*shape), format, precision="highest")


@pytest.mark.parametrize("how", ["forward over reverse", "reverse over reverse"])
def test_second_derivatives(how, normal):
    q = make(normal, NF4, ROWS, SIZE)
    x, x_dot = 0.1 * normal(4, SIZE), normal(4, SIZE)
    scales_dot = normal(*q.scales.shape)
    of_both = jax.grad(
        lambda x, scales: jnp.sum(jnp.sin(x @ q.replace(scales=scales).T)), (0, 1)
    )

    def changed(x, scales, x_dot, scales_dot):
        if how == "forward over reverse":
            return jax.jvp(of_both, (x, scales), (x_dot, scales_dot))[1]

        def along(x, scales):
            of_x, of_scales = of_both(x, scales)
            return jnp.vdot(of_x, x_dot) + jnp.vdot(of_scales, scales_dot)

        return jax.grad(along, (0, 1))(x, scales)

    got = jax.jit(changed)(x, q.scales, x_dot, scales_dot)
    for a, b in zip(got, expected(q, x, x_dot, scales_dot), strict=True):
        assert relative(a, b) < EXACT


def gradient(q, x, ct):
    """Return the gradient for the scales of `x @ q.T`."""
    return jax.grad(lambda s: jnp.vdot(x @ q.replace(scales=s).T, ct))(q.scales)


@pytest.mark.parametrize("stacked", [False, True], ids=["one weight", "a stack"])
def test_mapped_over(stacked, normal):
    """Each activation has its own gradient, with or without its own weight."""
    lead = (3,) if stacked else ()
    q = make(normal, Int8, *lead, ROWS, SIZE)
    x, ct = normal(3, 4, SIZE), normal(4, ROWS)
    axes = (0 if stacked else None, 0, None)
    got = jax.jit(jax.vmap(gradient, axes))(q, x, ct)
    dense = np.einsum("mr,bmk->brk", np.float64(ct), np.float64(x)) * levels_of(q)
    assert relative(got, of_blocks(dense)) < EXACT


def test_without_jit_and_without_rows(normal):
    q, x, ct = make(normal, Int8, ROWS, SIZE), normal(4, SIZE), normal(4, ROWS)
    dense = np.float64(ct).T @ np.float64(x) * levels_of(q)
    with jax.disable_jit():
        assert relative(gradient(q, x, ct), of_blocks(dense)) < EXACT
    assert (gradient(q, x[:0], ct[:0]) == jnp.zeros((ROWS, SIZE // BLOCK))).all()


def test_batched_products_of_a_stack(normal):
    q, x, ct = make(normal, Int8, 3, ROWS, SIZE), normal(3, 4, SIZE), normal(3, 4, ROWS)
    numbers = (((2,), (2,)), ((0,), (0,)))
    product = eqquant.quaxify(lambda x, w: lax.dot_general(x, w, numbers))
    loss = lambda s: jnp.vdot(product(x, q.replace(scales=s)), ct)
    got = jax.jit(jax.grad(loss))(q.scales)
    dense = np.einsum("bmr,bmk->brk", np.float64(ct), np.float64(x)) * levels_of(q)
    assert relative(got, of_blocks(dense)) < EXACT


def test_rows_are_split_by_the_mesh_axes_that_divide_them():
    """The 8 rows of the weight can be split in 4 parts, and the 6 tokens cannot."""
    mesh = AbstractMesh((2, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)

    def split(shape, dtype, axes):
        sharding = NamedSharding(mesh, P(axes, None))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    factors = (split((6, size), jnp.float32, "d") for size in (8, SIZE))
    codes = split((8, SIZE), jnp.uint8, ("m", "d"))
    of_rows = ScaleGradient(Int8(), 1, np.dtype(np.float32))
    with jax.sharding.use_abstract_mesh(mesh):
        of_scales = jax.eval_shape(
            lambda *args: scale_gradient(*args, gradient=of_rows, plan=None),
            *factors,
            codes,
        )
    assert of_scales.sharding.spec == P(("m", "d"), None)
