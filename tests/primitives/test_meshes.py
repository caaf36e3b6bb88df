"""Products over meshes: manual, automatic and explicit axes."""

import dataclasses

import eqquant
import jax
import jax.numpy as jnp
from eqquant import Binary, NF4
from helpers import (
    pairs,
    relative,
    TOLERANCE,
)
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


def make(normal, format, *shape, **kwargs):
    q = eqquant.quantize(normal(*shape), format, **kwargs)
    return q, q.dequantize()


# Blocked and per channel; the sharding of codes is independent of the format.
BOTH = [NF4(), Binary()]


def mesh_of(kind):
    return jax.make_mesh((8,), ("x",), axis_types=(kind,))


SPECS = {
    "weight by rows": (P(), P("x", None), P(None, "x")),
    "weight by columns": (P(None, "x"), P(None, "x"), P()),
}


@pairs("default_format, check_vma, how", BOTH, [True, False], SPECS)
def test_shard_map(default_format, check_vma, how, normal):
    format = dataclasses.replace(default_format, block_size=64)
    q, w = make(normal, format, 16, 512, precision="highest")
    x, ct = normal(4, 512), normal(4, 16)
    mesh = mesh_of(AxisType.Auto)
    x_spec, w_spec, y_spec = SPECS[how]

    def local(x, w):
        y = x @ w.T
        return lax.psum(y, "x") if how == "weight by columns" else y

    def loss(x, w, specs):
        f = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(x_spec, specs),
            out_specs=y_spec,
            check_vma=check_vma,
        )
        return jnp.sum(f(x, w) * ct)

    split = jax.tree.map(lambda _: w_spec, q)
    expected, gradient = jax.value_and_grad(lambda x: jnp.sum(x @ w.T * ct))(x)
    value, got = jax.value_and_grad(loss)(x, q, split)
    assert relative(value, expected) < 1e-5
    if check_vma:
        assert relative(got, gradient) < 1e-5  # Neither doubled nor divided by eight.


@pairs("default_format, w_spec", BOTH, [P("x"), P(None, "x")])
def test_automatic_partitioning(default_format, w_spec, normal):
    format = dataclasses.replace(default_format, block_size=64)
    q, w = make(normal, format, 16, 512)
    x = normal(4, 512)
    split = jax.device_put(q, NamedSharding(mesh_of(AxisType.Auto), w_spec))
    gradient = jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(x @ w.T))))
    for a, b in zip(gradient(x, split), gradient(x, w), strict=True):
        assert relative(a, b) < TOLERANCE["high"]


@pairs(
    "default_format, specs",
    BOTH,
    [(P(), P("x"), P(None, "x")), (P("x"), P(), P("x", None))],
)
def test_explicit_axes(default_format, specs, normal):
    x_spec, w_spec, expected = specs
    mesh = mesh_of(AxisType.Explicit)
    q, w = make(normal, default_format, 16, 512)
    x = normal(8, 512)
    y, gradient = x @ w.T, jax.grad(lambda x: jnp.sum(jnp.sin(x @ w.T)))(x)
    with jax.set_mesh(mesh):
        split = jax.device_put(q, NamedSharding(mesh, w_spec))
        rows = jax.device_put(x, NamedSharding(mesh, x_spec))
        got = jax.jit(lambda x, q: x @ q.T)(rows, split)
        assert jax.typeof(got).sharding.spec == expected
        pulled = jax.jit(jax.grad(lambda x, q: jnp.sum(jnp.sin(x @ q.T))))(rows, split)
    assert relative(got, y) < TOLERANCE["high"]
    assert relative(pulled, gradient) < 2e-3  # Through the sine of large values.
