"""Straight-through estimators: values and gradients."""

import functools as ft
import re

import eqquant
import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Binary, Int8, NF4, Ternary
from eqquant.kernels import cpu
from helpers import assert_identical, needs_compiler


ARRAYS = [
    ("float32", (9, 100), -1),
    ("bfloat16", (3, 4, 33), 1),
    ("float16", (8, 3, 3, 3), (1, 2, 3)),
    ("float32", (6, 70), (0, 1)),
]


def later(array, format, axis=-1):
    return eqquant.quantize(array, format, axis=axis).dequantize()


#
# The value
#


def test_the_value_is_that_of_the_later_array(normal, format):
    through = lambda a, axis: eqquant.straight_through(a, format, axis=axis)
    # These shapes have partial blocks.
    arrays = ARRAYS[:: 2 if format.block_size is None else -2]
    for dtype, shape, axis in arrays:
        array = normal(*shape, dtype=dtype)
        compiled = jax.jit(through, static_argnums=1)(array, axis)
        assert_identical(compiled, later(array, format, axis))
    assert_identical(through(array, axis), compiled)


TRANSFORMED = {
    "grad of jit": lambda f: (
        lambda x: jax.value_and_grad(
            lambda x: (jnp.sum(jax.jit(f)(x)), f(x)), has_aux=True
        )(x)[0][1]
    ),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[0],
    "linearize": lambda f: lambda x: jax.linearize(f, x)[0],
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1][0],
    "remat": jax.checkpoint,
}


@pytest.mark.parametrize("how", TRANSFORMED)
def test_the_value_under_transformations(normal, how):
    array, format = normal(7, 100), Ternary()
    fn = TRANSFORMED[how](lambda x: eqquant.straight_through(x, format))
    assert_identical(fn(array), later(array, format))
    assert_identical(jax.jit(fn)(array), later(array, format))


def test_in_float64():
    format = "ternary"
    with jax.enable_x64(True):
        array = jnp.asarray(np.random.default_rng(0).standard_normal((5, 70)))
        assert array.dtype == jnp.float64
        out, gradient = jax.value_and_grad(
            lambda x: jnp.sum(eqquant.straight_through(x, format) ** 2)
        )(array)
        assert_identical(
            jax.jit(lambda x: eqquant.straight_through(x, format))(array),
            later(array, format),
        )
        assert gradient.dtype == jnp.float64 and jnp.isfinite(out)


def test_scales_are_rounded_under_jit_too(normal):
    # XLA may drop a conversion to bfloat16 and back.
    for make in (NF4, Ternary):
        format = make(scale_dtype="bfloat16")
        array = normal(16, 256)
        through = jax.jit(lambda x, f=format: eqquant.straight_through(x, f) * 1)
        assert_identical(through(array), later(array, format))


@hypothesis.given(
    shape=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    which=st.sampled_from(["nf4", "int8", "ternary", "binary"]),
    block=st.sampled_from([None, 8, 64]),
    seed=st.integers(0, 2**16),
)
@hypothesis.settings(max_examples=4)
def test_any_shape(shape, which, block, seed):
    format = {"nf4": NF4, "int8": Int8, "ternary": Ternary, "binary": Binary}[which]
    format = format(block_size=block)
    array = jax.random.normal(jax.random.key(seed), shape)

    @jax.jit
    def both(x):
        out, pull = jax.vjp(lambda x: eqquant.straight_through(x, format), x)
        return out, later(x, format), pull(x)[0]

    out, expected, gradient = both(array)
    assert_identical(out, expected)
    assert_identical(gradient, array)


def test_eval_shape():
    out = jax.eval_shape(
        eqquant.straight_through, jax.ShapeDtypeStruct((4, 64), jnp.bfloat16)
    )
    assert out.shape == (4, 64) and out.dtype == jnp.bfloat16


#
# The gradient
#


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_gradient_is_that_of_the_identity(normal, default_format, dtype):
    array, ct = normal(7, 100, dtype=dtype), normal(7, 100, dtype=dtype)
    through = lambda x: eqquant.straight_through(x, default_format)

    @jax.jit
    def derivatives(array, ct):
        fns = through, jax.vmap(through), jax.checkpoint(through)
        both = lambda fn: (
            jax.vjp(fn, array)[1](ct)[0],
            jax.jvp(fn, (array,), (ct,))[1],
        )
        return [both(fn) for fn in fns]

    for pair in (*derivatives(array, ct), jax.vjp(through, array)[1](ct)):
        for derivative in pair:
            assert_identical(derivative, ct)


def test_second_derivatives(normal):
    array = normal(4, 64)

    def loss(x):
        return jnp.sum(eqquant.straight_through(x, "int8") ** 3) / 6

    # The derivative of x^3 / 6 at the rounded x.
    direction = jnp.ones_like(array)
    _, second = jax.jvp(jax.grad(loss), (array,), (direction,))
    np.testing.assert_allclose(second, later(array, "int8"), rtol=1e-6)


def test_second_derivatives_of_quantized_products(normal):
    """Second derivatives equal those of the dense product, including mixed ones."""
    linear, x = eqx.nn.Linear(64, 32, use_bias=False, key=jax.random.key(0)), normal(64)

    def mixed(quantized_products):
        def loss(weight, x):
            model = eqx.tree_at(lambda m: m.weight, linear, weight)
            options = {"quantized_products": quantized_products}
            model = eqquant.training.fake_quantize_tree(model, "int8", **options)
            return jnp.sum(model(x) ** 2)

        of_x = jax.grad(loss, 1)
        direction = jnp.ones_like(linear.weight)
        return jax.jvp(lambda w: of_x(w, x), (linear.weight,), (direction,))[1]

    # The derivative contains the result of the product, up to its rounding.
    np.testing.assert_allclose(mixed(True), mixed(False), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("format", [Binary(), Ternary(block_size=8)])
def test_a_clipped_gradient(normal, format):
    array = normal(6, 40)
    q = eqquant.quantize(array, format)
    block = 40 // q.scales.shape[-1]
    outside = np.abs(array) > np.repeat(q.scales, block, -1) * (1 + 1e-6)
    assert 0.1 < outside.mean() < 0.6
    through = lambda x: jnp.sum(eqquant.straight_through(x, format, clip=True))
    for grad in (jax.grad(through), jax.jit(jax.grad(through))):
        np.testing.assert_array_equal(grad(array), np.where(outside, 0, 1))


@pytest.mark.parametrize("format", [Int8(), NF4(scale_dtype="bfloat16")])
def test_what_takes_the_largest_magnitude_clips_nothing(normal, format):
    through = lambda x: jnp.sum(eqquant.straight_through(x, format, clip=True))
    assert (jax.grad(through)(normal(32, 256)) == 1).all()


@pytest.mark.skipif(isinstance(cpu.load(), str), reason="NATIVE KERNELS NOT RUN")
@pytest.mark.parametrize("format", [Int8(), NF4(), Ternary(), Binary()], ids=repr)
def test_on_a_cpu_it_is_one_pass(normal, format):
    """Rounding on a CPU adds no bytes to the compiler's count, which excludes the
    native kernel."""
    weight, x = normal(512, 512), normal(64, 512)

    def compiled(through):
        loss = lambda w, x: jnp.sum((x @ through(w).T) ** 2)
        return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(weight, x).compile()

    dense = compiled(lambda w: w)
    rounded = compiled(
        lambda w: eqquant.straight_through(w, format, check_finite=False)
    )
    count = lambda step: step.cost_analysis()["bytes accessed"]
    assert abs(count(rounded) - count(dense)) < weight.nbytes / 100
    calls = re.findall(r"= (.*) custom-call\(.*eqquant_round", rounded.as_text())
    assert len(calls) == 1 and calls[0].count("f32[512,512]") == 1


def test_a_subclass_is_rounded_as_it_encodes(normal):
    class Coarse(Int8):
        def encode(self, blocks, absmax, counts, limit):
            codes, scales = super().encode(blocks, absmax, counts, limit)
            return jnp.clip(codes // 2 * 2, -126, 126), scales

    array = normal(8, 64)
    value = eqquant.straight_through(array, Coarse())
    assert_identical(value, later(array, Coarse()))
    assert not (value == later(array, Int8())).all()


@ft.cache
def bytes_of_step(format):
    """Return the bytes per weight of value and gradients of a 1024 x 1024 layer.

    The count is the TPU compiler's.
    """

    @ft.partial(jax.value_and_grad, argnums=(0, 1))
    def step(weight, x):
        if format is not None:
            weight = eqquant.straight_through(weight, format, check_finite=False)
        return jnp.sum((x @ weight.T) ** 2)

    shapes = [jax.ShapeDtypeStruct((n, 1024), jnp.float32) for n in (1024, 64)]
    compiled = eqquant.debug.compile_for_tpu(step, *shapes)
    return compiled.cost_analysis()["bytes accessed"] / 1024**2


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("format", [Int8(), NF4()])
def test_on_tpu_it_is_no_more_than_one_pass(format):
    """Rounding adds at most 8 bytes per weight, one read and one write.

    It is fused into the product. Ternary and binary read more, for their means.
    """
    # On one device there are loops, which XLA counts once.
    assert jax.device_count() > 1
    assert bytes_of_step(format) - bytes_of_step(None) <= 8


#
# Errors
#


def test_not_finite(normal):
    bad = normal(4, 64).at[1, 2].set(jnp.nan)
    with pytest.raises(ValueError, match="1 values are NaN"):
        eqquant.straight_through(bad, "nf4")
    loss = lambda x: jnp.sum(eqquant.straight_through(x, "nf4") ** 2)
    with pytest.raises(ValueError, match="1 values are NaN"):
        jax.grad(loss)(bad)
    for fn in (jax.grad(loss), jax.checkpoint(loss), jax.vmap(loss)):
        with pytest.raises(eqx.EquinoxRuntimeError, match="not finite"):
            jax.block_until_ready(eqx.filter_jit(fn)(bad))
    eqquant.straight_through(bad, "nf4", check_finite=False)


def test_bad_arguments(normal):
    with pytest.raises(TypeError, match="floating-point dtype, got int32: only the"):
        eqquant.straight_through(jnp.ones((4, 64), jnp.int32))
    with pytest.raises(ValueError, match="format is 'fp3', but must be .*'nf3'"):
        eqquant.straight_through(normal(4, 64), "fp3")
    with pytest.raises(ValueError, match="axis must be between"):
        eqquant.straight_through(normal(4, 64), axis=2)
    with pytest.raises(
        ValueError, match=r"Int8, .*Int4, Int3, Int2, Ternary and Binary; got NF4"
    ):
        eqquant.training.initial_scales(normal(4, 64), "nf4")
    with pytest.raises(
        ValueError, match=r"Int8, .*Int4, Int3, Int2, Ternary and Binary; got NF4"
    ):
        eqquant.straight_through(normal(4, 64), "nf4", scales=jnp.ones((4, 1)))
    with pytest.raises(ValueError, match=r"shape \(4, 1\).*got \(4, 2\)"):
        eqquant.quantize(normal(4, 64), "int8", scales=jnp.ones((4, 2)))
    with pytest.raises(ValueError, match="positive and finite, but 1 out of 4 are not"):
        scales = jnp.ones((4, 1)).at[2].set(-1)
        eqquant.quantize(normal(4, 64), "int8", scales=scales)
    with pytest.raises(eqx.EquinoxRuntimeError, match="not positive"):
        fn = eqx.filter_jit(lambda w, s: eqquant.straight_through(w, "int8", scales=s))
        jax.block_until_ready(fn(normal(4, 64), -jnp.ones((4, 1))))


#
# Several devices
#


def test_in_shard_map(normal):
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("devices"), jax.sharding.PartitionSpec()
    weight, x = normal(8, 128), normal(3, 128)
    scales = eqquant.training.initial_scales(weight, "ternary")

    def product(weight, scales, x):
        return x @ eqquant.straight_through(weight, "ternary", scales=scales).T

    def loss(fn):
        return lambda *args: jnp.sum(fn(*args, x) ** 2)

    split = jax.shard_map(
        product,
        mesh=mesh,
        in_specs=(rows, rows, whole),
        out_specs=jax.sharding.PartitionSpec(None, "devices"),
    )
    actual, expected = (
        jax.jit(jax.grad(loss(fn), (0, 1)))(weight, scales) for fn in (split, product)
    )
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
