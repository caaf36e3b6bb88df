"""Defects of eformer 0.0.101 that eqquant must not have, by number.

`tests/training/test_straight_through.py` covers straight-through estimators (2 and
12), and `tests/kernels/test_tpu.py` covers TPU kernels (5).
"""

import functools as ft
import inspect

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Binary, Ternary
from eqquant.kernels import xla
from helpers import (
    assert_close,
    assert_identical,
    FORMATS,
    KINDS,
    pairs,
    relative,
    sqnr,
    TOLERANCE,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


FLOATS = ["float32", "bfloat16", "float16"]
SHAPE = (6, 200)

decode = jax.jit(eqquant.dequantize)


@pytest.fixture
def matrix(default_format, normal):
    return eqquant.quantize(normal(48, 80), default_format)


#
# 1: products that ignore their arguments
#


@pairs(
    "equation, default_format",
    ["bn,kn->bk", "bn,kn->kb", "nb,kn->bk", "bk,kn->nb"],
    KINDS,
)
def test_1_products_use_their_dimension_numbers(equation, matrix, normal):
    operand, *_ = equation.split(",")
    sizes = {"b": 3, "n": 80, "k": 48}
    x = normal(*(sizes[axis] for axis in operand))
    product = eqquant.quaxify(ft.partial(jnp.einsum, equation, precision="highest"))
    assert_close(product(x, matrix), product(x, decode(matrix)), TOLERANCE["highest"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_1_products_use_their_precision_and_dtype(dtype, matrix, normal):
    x = normal(3, 80, dtype=dtype)
    product = eqquant.quaxify(
        ft.partial(jnp.matmul, precision="highest", preferred_element_type="float32")
    )
    out = product(x, matrix.T)
    assert out.dtype == jnp.float32
    assert relative(out, product(x, decode(matrix.T))) < TOLERANCE["highest"]


def test_1_a_vector_times_a_matrix_is_a_vector(default_format, normal):
    w = normal(48, 80)
    q = eqquant.quantize(w, default_format, axis=0)
    assert (normal(48) @ q).shape == (80,)


#
# 3: scales and levels
#


@pytest.mark.parametrize("format", [Ternary(), Binary()], ids=repr)
def test_3_binary_and_ternary_have_scales_and_correct_levels(format, normal):
    w = 0.02 * normal(64, 256)
    q = eqquant.quantize(w, format)
    assert sqnr(decode(q), w) > 4
    levels = {-1, 1} if format == Binary() else {-1, 0, 1}
    assert set(np.unique(np.asarray(decode(q)) / np.asarray(q.scales))) == levels
    assert q.codes.nbytes == w.size * (1 if format == Binary() else 2) // 8


#
# 4: padding
#


def test_4_padding_does_not_leak(default_format, normal):
    w = normal(256, 100)
    q = eqquant.quantize(w, default_format)
    assert q.shape == decode(q).shape == (256, 100)
    assert q.T.shape == (100, 256)
    # Gradients exclude the padding.
    slope = jax.jit(jax.grad(lambda x: jnp.sum(q @ x)))(jnp.ones(100))
    assert relative(slope, jnp.sum(decode(q), 0)) < TOLERANCE[q.compute.precision]


#
# 11, 13: values
#


def test_11_zero_and_one_are_exact_and_requantizing_is_stable(normal):
    w = normal(*SHAPE).at[:, ::64].set(jnp.array([0.0, 1, 0, 1])).clip(-1, 1)
    first = values = decode(eqquant.quantize(w, "nf4"))
    assert (values[:, [0, 128]] == 0).all() and (values[:, [64, 192]] == 1).all()
    for _ in range(20):
        values = decode(eqquant.quantize(values, "nf4"))
    assert_identical(values, first)


def test_13_small_float16_weights_keep_their_accuracy(format, normal):
    if format.name == "mxfp4":
        pytest.skip("Its clipping depends on the mantissa of the largest value.")
    w = normal(*SHAPE)
    expected = sqnr(decode(eqquant.quantize(w, format)), w)
    small = (w * 1e-4).astype(jnp.float16)
    values = eqquant.quantize(small, format).astype(jnp.float32)
    # The weights differ: float16 rounds them to multiples of 2**-24, 0.02% of their
    # size.
    assert abs(sqnr(decode(values), small) - expected) < 0.2


@pairs("format, dtype, size", FORMATS, FLOATS, [300.0, 3e4])
def test_13_large_weights_do_not_saturate(format, dtype, size, rng):
    if format.name == "mxfp4":
        pytest.skip("Its clipping depends on the mantissa of the largest value.")
    w = jnp.asarray(rng.uniform(-size, size, SHAPE), dtype)
    ordinary = (w / size).astype(dtype)
    expected = sqnr(decode(eqquant.quantize(ordinary, format)), ordinary)
    values = eqquant.quantize(w, format)
    # The dtype rounds both differently: bfloat16 has 54 dB, and int8 has 47 dB for
    # uniform weights.
    assert abs(sqnr(decode(values), w) - expected) < 1


def test_13_nan_is_not_zero(format):
    with pytest.raises(ValueError, match="NaN"):
        eqquant.quantize(jnp.full(SHAPE, jnp.nan), format)


#
# 6, 7, 9: operations on quantized arrays
#


def test_6_transposing_does_not_requantize(matrix, normal):
    x = normal(3, 80)
    assert_identical(decode(matrix.T), decode(matrix).T)
    assert_identical(matrix.T.T, matrix)
    assert relative(x @ matrix.T, x @ decode(matrix).T) < TOLERANCE["high"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda w: w.reshape(6, 8, 80),
        lambda w: w[None],
        lambda w: w[None].squeeze(0),
        lambda w: jnp.sqrt(jnp.abs(w)),
        lambda w: w * 2 + w,
        lambda w: jnp.sum(w, 0),
        lambda w: jnp.max(w, -1),
        lambda w: w**3,
    ],
)
def test_7_array_operations_work(fn, matrix):
    out = eqquant.dequantize(eqquant.quaxify(fn, on_materialise="allow")(matrix))
    assert_close(
        out, fn(decode(matrix)), 1e-6
    )  # XLA fuses them differently, so rounding differs.


@pairs("other, default_format", KINDS, KINDS)
def test_9_formats_can_be_mixed(other, matrix, normal):
    q = eqquant.quantize(normal(80, 24), other, axis=0)
    multiply = eqquant.quaxify(
        ft.partial(jnp.matmul, precision="highest"), on_materialise="allow"
    )
    assert_close(multiply(matrix, q), multiply(decode(matrix), decode(q)), 3e-6)
    same = eqquant.quantize(normal(48, 80), other)
    add = eqquant.quaxify(jnp.add, on_materialise="allow")
    assert_identical(add(matrix, same), decode(matrix) + decode(same))


#
# 8: mutation
#


@pytest.mark.parametrize("dtype", FLOATS)
def test_8_astype_does_not_mutate(dtype, matrix):
    before = jax.tree.map(jnp.copy, matrix)
    assert matrix.astype(dtype).dtype == dtype
    assert_identical(matrix, before)


def test_8_astype_to_integers_converts_values_with_a_warning(matrix):
    with pytest.warns(eqquant.arrays.MaterialiseWarning, match="int32"):
        out = matrix.astype(jnp.int32)
    assert_identical(out, decode(matrix).astype(jnp.int32))


#
# 10: control flow
#


def test_10_conditions_take_quantized_arrays(matrix, normal):
    def fn(w, x, which):
        return jax.lax.cond(which, lambda w: x @ w.T, lambda w: 2 * (x @ w.T), w)

    x = normal(3, 80)
    for which in (True, False):
        out = eqquant.quaxify(fn)(matrix, x, which)
        assert_close(out, fn(decode(matrix), x, which))


def test_10_vmap_and_scan_over_stacked_weights(default_format, normal):
    weights, x = normal(4, 32, 32), normal(32)
    stacked = eqx.filter_vmap(ft.partial(eqquant.quantize, format=default_format))(
        weights
    )
    assert stacked.shape == (4, 32, 32)

    def scan(w, x):
        return jax.lax.scan(lambda x, w: (w @ x / 6, x), x, w)

    def ensemble(w, x):
        return jax.vmap(lambda w: w @ x)(w)

    for fn in (scan, ensemble):
        assert_close(fn(stacked, x), fn(decode(stacked), x), 2 * TOLERANCE["high"])


def test_10_while_loops_run(matrix, normal):
    def fn(w, x):
        return jax.lax.while_loop(lambda x: x[0] < 1e3, lambda x: jnp.abs(w @ x) + x, x)

    square = eqquant.quantize(normal(32, 32), matrix.format)
    x = jnp.ones(32)
    # Rounding errors grow in the loop.
    assert_close(fn(square, x), fn(decode(square), x), 1e-3)


def test_10_closures_are_found(matrix, normal):
    x = normal(80)
    out = eqquant.quaxify(lambda x: jnp.dot(matrix, x), on_materialise="error")(x)
    assert_close(out, decode(matrix) @ x)


#
# 14: settings outside of the jit cache
#


def test_14_kernel_settings_are_part_of_the_structure(matrix, normal):
    x = normal(300, 80)
    product = jax.jit(lambda q, x: x @ q.T)
    # The exact kernel may be the fastest for both precisions.
    settings = {"precision": "default", "activations": "int8"}, {"precision": "highest"}
    fast, exact = (eqquant.with_compute(matrix, **setting) for setting in settings)
    # One function, traced once for each.
    assert relative(product(fast, x), x @ decode(matrix).T) > 1e-4
    assert relative(product(exact, x), x @ decode(matrix).T) < TOLERANCE["highest"]
    assert "global " not in inspect.getsource(xla)


#
# 15: sharding, and gradients of scales
#


def test_15_a_spec_survives_a_transpose_on_the_right_axis(matrix):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharded = eqx.filter_shard(matrix, NamedSharding(mesh, P("x", None)))
    rows = matrix.shape[0] // 8
    assert {s.data.shape[0] for s in sharded.codes.addressable_shards} == {rows}
    transposed = jax.jit(lambda q: q.T.dequantize())(sharded)
    assert {s.data.shape for s in transposed.addressable_shards} == {(80, rows)}


def test_15_spec_without_a_mesh_raises(matrix):
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        eqx.filter_shard(matrix, P("x", None))


def test_15_scales_are_frozen_by_default(default_format):
    layer = eqx.nn.Linear(80, 48, key=jax.random.key(0))
    layer = eqquant.quantize_tree(layer, default_format, min_size=0)
    trainable, frozen = eqx.partition(layer, eqquant.trainable_mask(layer))
    assert not jax.tree.leaves(trainable.weight) and frozen.weight.scales is not None
    assert eqx.is_array(trainable.bias)
