"""`eqquant.quantize` under transformations, and over several devices."""

import functools as ft

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from eqquant.arrays.quantized._encode import encode_rows
from helpers import (
    assert_identical,
    fast,
    KINDS,
    pairs,
    relative,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


# Not divisible by blocks of 32 or 64, or groups of 64.
SHAPE = (6, 200)

decode = jax.jit(eqquant.dequantize)


def test_jit_is_the_same_bit_by_bit(format, normal):
    w = normal(*SHAPE)
    jitted = jax.jit(lambda w: eqquant.quantize(w, format))
    assert_identical(jitted(w), eqquant.quantize(w, format))


def test_vmap_is_the_same_bit_by_bit(format, normal):
    w = normal(*SHAPE)
    rows = jax.vmap(lambda w: eqquant.quantize(w, format))(w)
    assert_identical(rows, eqquant.quantize(w, format))
    columns = jax.vmap(
        lambda w: eqquant.quantize(w, format, check_finite=False), in_axes=1
    )(w)
    assert_identical(decode(columns), decode(eqquant.quantize(w.T, format)))


def test_eval_shape_tells_the_truth(format, normal):
    w = normal(*SHAPE)
    expected = eqquant.quantize(w, format)
    shapes = jax.eval_shape(lambda w: eqquant.quantize(w, format), w)
    assert jax.tree.structure(shapes) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(shapes), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def assert_same_up_to_summation(actual, expected):
    """Check equality bit for bit for absmax scales, and up to rounding for mean scales.

    XLA sums the 512 numbers of a mean in an order that depends on the sharding.
    """
    assert_identical(actual.codes, expected.codes)
    if expected.format.name in ("nf4", "int8") or expected.format.quantized_scales:
        assert_identical(actual.scales, expected.scales)
    else:
        np.testing.assert_allclose(actual.scales, expected.scales, rtol=512 * 2**-24)


@pairs("default_format, axis", fast("int8", "binary", formats=KINDS), [0, 1, 2])
def test_sharded_input_gives_the_same_sharded_the_same(default_format, axis, normal):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P(*(None,) * axis, "x"))
    w = normal(16, 8, 512)
    expected = eqquant.quantize(w, default_format)
    for quantize in (eqquant.quantize, eqx.filter_jit(eqquant.quantize)):
        q = quantize(jax.device_put(w, sharding), default_format)
        assert q.codes.sharding.is_equivalent_to(sharding, 3)
        assert_same_up_to_summation(q, expected)


@pairs(
    "default_format, axis, size",
    fast("int8", "binary", formats=KINDS),
    [0, 1, 2],
    [512, 520],
)
def test_sharded_input_on_an_explicit_mesh(default_format, axis, size, normal):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    spec = P(*(None,) * axis, "x")
    w = normal(16, 8, size)
    expected = eqquant.quantize(w, default_format)
    sharded = jax.device_put(w, NamedSharding(mesh, spec))
    for quantize in (eqquant.quantize, eqx.filter_jit(eqquant.quantize)):
        q = quantize(sharded, default_format)
        even = q.codes.shape[axis] % 8 == 0
        kept = (
            P(*(None,) * axis, "x", *(None,) * (2 - axis))
            if even
            else P(None, None, None)
        )
        assert jax.typeof(q.codes).sharding.spec == kept
        assert_same_up_to_summation(q, expected)
        values = q.dequantize()
        assert jax.typeof(values).sharding.spec == kept
        # Sharded like the scales.
        assert relative(values, expected.dequantize()) < 1e-6


def test_temporaries_are_small(default_format):
    # 64 MB of float32, in chunks of 4 MB.
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    lowered = encode_rows.lower(w, format=default_format, axes=(-1,), at_once=2**20)
    temporary = lowered.compile().memory_analysis().temp_size_in_bytes
    searches = getattr(default_format, "fit", "absmax") != "absmax"
    assert temporary < (20e6 if searches else 10e6)


def test_rows_longer_than_a_step_are_encoded_one_at_a_time(normal):
    w = normal(3, 128)
    encode = ft.partial(encode_rows, w, format=eqquant.NF4(), axes=(-1,))

    assert_identical(encode(at_once=64), encode(at_once=None))
