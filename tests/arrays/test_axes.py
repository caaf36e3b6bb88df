"""Structural operations that the parts of an array support, and the others."""

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Int8, NF4
from eqquant.arrays import hadamard, RotatedArray
from helpers import assert_close, assert_identical, strict
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P


TWICE = NF4(double_quantization=True)


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def test_what_a_quantized_array_cannot_be(normal, mesh):
    q = eqquant.quantize(normal(4, 128), "nf4")
    both = eqquant.quantize(normal(4, 8, 64), "nf4", axis=(1, 2))
    single = eqquant.quantize(normal(4, 1), "int8")
    large = eqquant.quantize(normal(1, 64 * 512), TWICE)
    for out in (
        single.broadcast_in_dim((4, 5), (0, 1)),  # Copies along the blocked axis.
        q.slice((0, 32), (4, 128)),  # Within a block.
        q.slice((0, 0), (4, 64), (1, 2)),
        both.slice((0, 1, 0), (4, 8, 64)),
        large.slice((0, 64), (1, 64 * 512)),  # Within blocks that share an exponent.
        q.reverse((1,)),
        q.dynamic_slice((0, 0), (4, 64)),
        q.concatenate([q], 1),
        q.power(2),
        # Each device gets whole blocks of one axis without padding.
        q.split_specs(P(None, "x"), mesh),
        eqquant.quantize(normal(4, 500), "nf4").split_specs(P(None, "x"), mesh),
        both.split_specs(P(None, None, "x"), mesh),
        large.split_specs(P(None, "x"), mesh),
    ):
        assert out is NotImplemented
    assert both.split_specs(P("x"), mesh).codes == P("x", None)


def test_an_empty_array_is_reshaped_or_not(normal):
    """The shape of an empty array does not determine its blocked axis."""
    q = eqquant.quantize(normal(4, 64), "nf4")[:0]
    assert q.reshape(0, 1, 64).shape == (0, 1, 64)
    several = eqquant.quantize(normal(3, 4, 0), "nf4")
    assert several.with_shape((5, 0)) is NotImplemented
    assert several.with_shape((12, 0)).codes.shape[0] == 12


def test_blocks_over_several_axes_come_apart_where_none_crosses(normal):
    w = normal(2, 4, 64)
    q = eqquant.quantize(w, "nf4", axis=(1, 2))
    apart = q.unflatten()
    assert apart.axes == (-1,)
    assert_identical(apart.dequantize(), q.dequantize())
    assert apart.unflatten() is apart
    crossing = eqquant.quantize(normal(2, 4, 48), "nf4", axis=(1, 2))
    assert crossing.unflatten() is NotImplemented


def test_a_stack_whose_matrices_are_not_last_is_decoded_to_look_up(normal):
    q = eqquant.quantize(normal(64, 4, 3), "nf4", axis=0)
    rows = np.array([2, 0])
    assert q.whole_axes is None
    with pytest.warns(eqquant.arrays.MaterialiseWarning):
        assert_identical(q[rows], q.dequantize()[rows])
    # Lookups across a block.
    last = eqquant.quantize(normal(4, 64), "nf4")
    columns = (slice(None), rows), (rows, rows), (slice(None), jnp.array([63]))
    # The warning is shown once per location.
    with pytest.warns(eqquant.arrays.MaterialiseWarning):
        for index in (*columns, (rows, slice(0, 3)), (rows, None)):
            assert_identical(last[index], last.dequantize()[index])


def make_rotated(w, block=64, **how):
    return RotatedArray(eqquant.quantize(hadamard(w, -1, block), Int8(**how)), block)


def test_what_a_rotated_array_cannot_be(normal, mesh):
    w = make_rotated(normal(4, 3, 128))
    for out in (
        w.slice((0, 0, 32), (4, 3, 128)),
        w.reverse((2,)),
        w.put(normal(3, 64), lambda part, new: part.at[0].set(new)),
        w.split_specs(P(None, None, "x"), mesh),  # Within a block.
        # Whole blocks of the rotation, but not of the scales.
        make_rotated(normal(4, 2048), block_size=512).split_specs(P(None, "x"), mesh),
    ):
        assert out is NotImplemented
    assert w.split_specs(P(None, None, None), mesh).base.codes == P(None, None, None)
    assert w.with_shape((4, 3 * 128)) is NotImplemented


def test_products_of_a_rotated_array(normal):
    """Products contract the rotated axis or another axis, but no batch axis is
    rotated."""
    w = make_rotated(normal(4, 3, 128))
    dense = w.dequantize()
    x = jnp.arange(5 * 128).reshape(5, 128) % 7  # Integers.
    product = lambda w, x: lax.dot_general(x, w, (((1,), (2,)), ((), ())))
    assert_close(strict(product)(w, x), product(dense, x.astype(jnp.float32)))
    each = lambda w, x: jnp.einsum("oik,bok->bki", w, x)
    y = normal(2, 4, 128)
    with pytest.warns(eqquant.arrays.MaterialiseWarning):
        got = eqquant.quaxify(each)(w, y)
    assert_close(got, each(dense, y))
    assert w.rounds_activations is False
