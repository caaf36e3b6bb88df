"""Operations without a quantized result, which decode under the policy."""

import functools as ft

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_identical, relative, strict
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P


loose = ft.partial(eqquant.quaxify, on_materialise="allow")

MOVED = {
    "broadcast_in_dim": lambda q, x: jnp.broadcast_to(q[:, :1], (6, 128)),
    "slice": lambda q, x: lax.slice(q, (0, 3), (6, 10)),
    "split": lambda q, x: jnp.split(q, [10], axis=1),
    "dynamic_slice": lambda q, x: lax.dynamic_slice(q, (0, 3), (6, 10)),
    "gather": lambda q, x: jnp.take(q, jnp.array([3, 70]), axis=1),
    "gather, filled": lambda q, x: q.at[jnp.array([1, 9])].get(
        mode="fill", fill_value=7.0
    ),
    "concatenate": lambda q, x: jnp.concatenate([q, q], axis=1),
    "concatenate with floats": lambda q, x: jnp.concatenate([q, x]),
    "stack with floats": lambda q, x: jnp.stack([q, x]),
    "select": lambda q, x: lax.select_n(jnp.array(True), q, x),
    "select of different kinds": lambda q, x: lax.select_n(
        jnp.array(True), q[:6, :6], q[:6, :6].T
    ),
    "rev": lambda q, x: lax.rev(q, (1,)),
    "convert_element_type": lambda q, x: q.astype(jnp.int32),
    "reshape": lambda q, x: q.reshape(12, 64).reshape(24, 32),
}


@pytest.mark.parametrize("name", MOVED)
def test_what_cuts_blocks_decodes(name, normal):
    w, x = normal(6, 128), normal(6, 128)
    q = eqquant.quantize(w, "nf4")
    fn = MOVED[name]
    with pytest.raises(eqquant.MaterialiseError):
        strict(fn)(q, x)
    got = jax.tree.map(
        eqquant.dequantize, loose(fn)(q, x), is_leaf=eqquant.is_quantized
    )
    assert_identical(got, fn(q.dequantize(), x))


def test_quantized_indices_decode(normal):
    """Indices of gathers and starts of slices are data."""
    q = eqquant.quantize(jnp.ones((2, 64)), "int8")
    x = normal(5, 4)
    take = lambda q, x: jnp.take(x, q[:, :3].astype(jnp.int32), axis=0)
    assert_identical(loose(take)(q, x), take(q.dequantize(), x))
    choose = lambda q, x: jnp.where(q[0, 0] > 0, x, -x)
    assert_identical(loose(choose)(q, x), x)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_products_of_two_dtypes_are_those_of_lax(dtype, normal):
    q = eqquant.quantize(normal(8, 64), "int8")
    x = normal(3, 64).astype(dtype)
    fn = lambda q, x: lax.dot_general(x, q, (((1,), (1,)), ((), ())))
    got, expected = strict(fn)(q, x), fn(q.dequantize(), x)
    assert got.dtype == expected.dtype
    assert relative(got, expected) < 1e-2  # The result is rounded to bfloat16.


def test_integers_and_named_algorithms(normal):
    q = eqquant.quantize(normal(8, 64), "int8")
    counts = jnp.arange(3 * 64).reshape(3, 64) % 5
    product = lambda q, x: x @ q.T
    got = strict(product)(q, counts)
    assert relative(got, counts @ q.dequantize().T) < 1e-4  # 15-bit activations.
    # A named algorithm maps to the highest precision.
    named = lambda q, x: jnp.dot(x, q.T, precision="F32_F32_F32")
    x = normal(3, 64)
    assert relative(strict(named)(q, x), x @ q.dequantize().T) < 1e-6
    into_integers = lambda q, x: lax.dot(x, q.T, preferred_element_type=jnp.int32)
    with pytest.raises((eqquant.MaterialiseError, TypeError)):
        strict(into_integers)(q, counts)


def test_convolutions_without_a_product(normal):
    kernel = eqquant.quantize(normal(4, 2, 3), "int8", axis=(1, 2))
    x = normal(2, 2, 9)
    by_batch = lambda w, x: lax.conv_general_dilated(
        x, w, (1,), "VALID", batch_group_count=2
    )
    with pytest.raises(eqquant.MaterialiseError, match="conv_general_dilated"):
        strict(by_batch)(kernel, x)
    expected = by_batch(kernel.dequantize(), x)
    assert relative(loose(by_batch)(kernel, x), expected) < 1e-6
    empty = lambda w, x: lax.conv_general_dilated(x[:0], w, (1,), "VALID")
    assert loose(empty)(kernel, x).shape == (0, 4, 7)


def test_placement_that_does_not_split_blocks_evenly(normal):
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    q = eqquant.quantize(normal(6, 128), "nf4")  # Two blocks per row.
    one = jax.devices()[1]
    placed = strict(lambda q: jax.device_put(q, one))(q)
    assert_identical(placed, q)
    assert placed.codes.devices() == {one}
    uneven = NamedSharding(mesh, P(None, "x"))
    for fn in (
        lambda q: jax.device_put(q, uneven),
        jax.jit(lambda q: lax.with_sharding_constraint(q, uneven)),
    ):
        with pytest.raises(eqquant.MaterialiseError):
            strict(fn)(q)
        assert_identical(np.asarray(loose(fn)(q)), np.asarray(q.dequantize()))

    @ft.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(None, "x")), out_specs=P(None, None)
    )
    def product(x, q):
        return lax.psum(x @ q.T, "x") if q.shape == (6, 16) else x

    x = normal(3, 16)
    with pytest.raises(eqquant.MaterialiseError, match="shard_map"):
        strict(product)(x, q)


def test_a_derivative_of_the_scales_through_a_rule_of_the_user(normal):
    @jax.custom_jvp
    def product(w, x):
        return x @ w.T

    product.defjvp(lambda p, t: (p[1] @ p[0].T, 3 * (p[1] @ t[0].T + t[1] @ p[0].T)))
    q = eqquant.quantize(normal(4, 64), "int8")
    x = normal(3, 64)

    def loss(fn, scales, x):
        return jnp.sum(jnp.sin(fn(q.replace(scales=scales), x)))

    plain = lambda q, x: product(q.dequantize(), x)
    expected = jax.grad(ft.partial(loss, plain), (0, 1))(q.scales, x)
    actual = jax.grad(ft.partial(loss, loose(product)), (0, 1))(q.scales, x)
    for a, b in zip(actual, expected, strict=True):
        assert relative(a, b) < 1e-3  # 15 bits of activations.
