"""`hadamard`: the rotation of an axis, by the native kernel and by XLA."""

import functools as ft

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.kernels import cpu
from eqquant.primitives import hadamard
from helpers import assert_identical, relative
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from scipy.linalg import hadamard as sylvester


library = cpu.load()
needs_library = pytest.mark.skipif(
    isinstance(library, str), reason=f"NATIVE KERNELS NOT RUN: {library}"
)
TARGET = "eqquant_rotate"


def reference(x, block):
    """Rotate the last axis in float64."""
    parts = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, block)
    return (parts @ sylvester(block) / np.sqrt(block)).reshape(x.shape)


def lowered(fn, *args) -> str:
    return jax.jit(fn).lower(*args).as_text()


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    log=st.integers(0, 12),
    blocks=st.integers(1, 3),
    rows=st.sampled_from([(), (1,), (7,), (2, 300)]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_values_are_those_of_the_matrix(log, blocks, rows, dtype):
    block = 2**log
    x = np.random.default_rng(0).normal(size=(*rows, blocks * block))
    x = jnp.asarray(x, dtype)
    got = hadamard(x, -1, block)
    assert got.dtype == dtype
    # The sums have at most 12 steps in float32. bfloat16 is rounded once.
    tolerance = 1e-6 if dtype == jnp.float32 else 2**-8
    assert relative(got, reference(x, block)) < tolerance
    first = hadamard(jnp.moveaxis(x, -1, 0), 0, block)
    assert relative(jnp.moveaxis(first, 0, -1), reference(x, block)) < tolerance


def test_large_values_do_not_overflow():
    x = jnp.full((2, 64), 1e37, jnp.float32)
    np.testing.assert_allclose(hadamard(x, -1, 64)[:, 0], 8e37, rtol=1e-6)


def test_float64_is_not_rounded():
    with jax.enable_x64():
        x = np.random.default_rng(0).normal(size=(3, 64))
        assert relative(hadamard(jnp.asarray(x), -1, 64), reference(x, 64)) < 1e-15


def test_no_values():
    assert hadamard(jnp.zeros((0, 64)), -1, 64).shape == (0, 64)
    assert hadamard(jnp.zeros((64, 0)), 0, 64).shape == (64, 0)


def test_transformations(normal):
    rotate = ft.partial(hadamard, axis=-1, block=32)
    x, y = normal(4, 5, 96), normal(4, 5, 96)
    expected = rotate(x)
    for mapped in (jax.vmap(rotate), jax.vmap(jax.vmap(rotate)), jax.jit(rotate)):
        assert_identical(mapped(x), expected)
    within = jax.vmap(rotate, 1, 1)(x)
    assert_identical(within, expected)
    value, tangent = jax.jvp(rotate, (x,), (y,))
    assert_identical(value, expected)
    assert_identical(tangent, rotate(y))
    _, pull = jax.vjp(rotate, x)
    assert_identical(pull(y)[0], rotate(y))
    with jax.disable_jit():
        assert relative(rotate(x), expected) < 1e-6


@needs_library
def test_a_row_takes_one_call(normal):
    x = normal(1, 1536)
    text = lowered(lambda x: hadamard(x, -1, 512), x)
    assert TARGET in text and "dot_general" not in text
    twice = lambda x: hadamard(x, -1, 512) + jnp.sin(hadamard(x, -1, 512))
    compiled = jax.jit(twice).lower(x).compile().as_text()
    assert compiled.count(f'custom_call_target="{TARGET}"') == 1, "products share it"


@needs_library
def test_programs_without_the_kernel(normal):
    rotate = ft.partial(hadamard, axis=-1, block=32)
    x = normal(8, 64)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    split = jax.device_put(x, NamedSharding(mesh, P("x")))
    assert TARGET not in lowered(rotate, split)
    assert relative(jax.jit(rotate)(split), rotate(x)) < 1e-6
    exported = jax.export.export(jax.jit(rotate))(x)
    assert TARGET not in exported.mlir_module()
    assert relative(exported.call(x), rotate(x)) < 1e-6
    local = jax.shard_map(rotate, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    assert TARGET in lowered(local, split), "each device rotates its rows"
    assert_identical(local(split), rotate(x))


@needs_library
@pytest.mark.parametrize("block", [0, 3, 128])
def test_the_kernel_checks_the_block(block):
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((2, 64), jnp.float32))
    with pytest.raises(Exception, match="block must be a power of two that divides"):
        jax.block_until_ready(call(jnp.ones((2, 64)), block=np.int64(block)))
