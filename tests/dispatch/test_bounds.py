"""Indices out of bounds: every primitive that indexes agrees with the dense array."""

import eqquant
import jax
import jax.numpy as jnp
import pytest
from eqquant import Int8, NF4
from helpers import assert_close, pairs, strict
from jax import lax
from numpy.testing import assert_array_equal


SIZE, WIDTH = 4, 64
INDICES = range(-3 * SIZE, 3 * SIZE + 1)
ROW, ROWS = jnp.linspace(-1, 1, WIDTH), jnp.linspace(-1, 2, 2 * WIDTH)[::-1]
ROWS = ROWS.reshape(2, WIDTH)


def both(i):
    return jnp.stack([i, jnp.ones_like(i)])


def gather(x, i, mode, *axes):
    numbers = lax.GatherDimensionNumbers((0, 1), (), axes)
    return lax.gather(x, jnp.stack([i] * len(axes)), numbers, (3, WIDTH), mode=mode)


def scatter(x, i, mode):
    numbers = lax.ScatterDimensionNumbers((0, 1), (), (0,))
    return lax.scatter(x, i[None], ROWS, numbers, mode=mode)


def starts(i, negative):
    return {"start_indices": (i, i), "allow_negative_indices": negative}


READS = {
    "x[i]": lambda x, i: x[i],
    "x[array]": lambda x, i: x[both(i)],
    "x.T[:, i]": lambda x, i: x.T[:, i],
    "an unsigned index": lambda x, i: x[i.astype("uint32")],
    "index in dimension": lambda x, i: lax.dynamic_index_in_dim(x, i, 0),
    "take": lambda x, i: jnp.take(x, both(i), 0),
    "take, fill": lambda x, i: jnp.take(x, both(i), 0, mode="fill", fill_value=0),
    "take, wrap": lambda x, i: jnp.take(x, both(i), 0, mode="wrap"),
    "gather of whole rows": lambda x, i: gather(x, i, "clip", 0, 1),
}
WRITES = {
    "index in dimension, update": lambda x, i: lax.dynamic_update_index_in_dim(
        x, ROW, i, 0
    ),
}
for negative in (True, False):
    READS[f"slice, negative {negative}"] = lambda x, i, negative=negative: (
        lax.dynamic_slice(x, slice_sizes=(3, WIDTH), **starts(i, negative))
    )
    WRITES[f"update, negative {negative}"] = lambda x, i, negative=negative: (
        lax.dynamic_update_slice(x, ROWS, **starts(i, negative))
    )
    for mode in ("clip", "fill", "promise_in_bounds"):
        how = {"mode": mode, "wrap_negative_indices": negative}
        READS[f"get, {how}"] = lambda x, i, how=how: x.at[both(i)].get(**how)
        READS[f"get one, {how}"] = lambda x, i, how=how: x.at[i].get(**how)
        WRITES[f"set, {how}"] = lambda x, i, how=how: x.at[both(i)].set(ROWS, **how)
        WRITES[f"set one, {how}"] = lambda x, i, how=how: x.at[i].set(ROW, **how)
for mode in ("clip", "fill", "promise_in_bounds"):
    READS[f"gather, {mode}"] = lambda x, i, mode=mode: gather(x, i, mode, 0)
    WRITES[f"scatter, {mode}"] = lambda x, i, mode=mode: scatter(x, i, mode)


def table(format, normal):
    """Return a quantized table, and its values."""
    q = eqquant.quantize(normal(SIZE, WIDTH), format)
    return q, q.dequantize()


def at_all_indices(fn):
    """Return a program that calls `fn` at each of the indices."""
    indices = jnp.array(INDICES)
    decoded = lambda x, i: eqquant.dequantize(fn(x, i))
    return jax.jit(lambda x: lax.map(lambda i: decoded(x, i), indices))


@pairs("name, format", READS, [Int8(), NF4(double_quantization=True)])
def test_reads(name, format, normal):
    (q, dense), fn = table(format, normal), READS[name]
    expected = at_all_indices(fn)(dense)
    assert_array_equal(at_all_indices(strict(fn))(q), expected)
    for i in (-SIZE - 1, -1, SIZE):  # Eager.
        at = jnp.int32(i)
        assert_array_equal(eqquant.dequantize(strict(fn)(q, at)), fn(dense, at))


@pairs("name, format", WRITES, [Int8(), NF4(double_quantization=True)])
def test_writes(name, format, normal):
    (q, dense), fn = table(format, normal), WRITES[name]
    expected = at_all_indices(fn)(dense)
    is_new = at_all_indices(fn)(jnp.full_like(dense, 9)) != 9
    got = at_all_indices(strict(fn))(q)
    # All other rows are unchanged, bit for bit.
    assert_array_equal(jnp.where(is_new, 0, got), jnp.where(is_new, 0, expected))
    rounding = 0.01 if format.name == "int8" else 0.15
    assert_close(got, expected, rounding)
    for i in (-SIZE - 1, -1, SIZE):
        row = INDICES.index(i)
        assert_array_equal(strict(fn)(q, jnp.int32(i)).dequantize(), got[row])


PROTOCOL = {
    "row": ((SIZE, WIDTH), lambda x, i: x[i]),
    "rows": ((SIZE, WIDTH), lambda x, i: x[both(i)]),
    "matrix": ((SIZE, 3, WIDTH), lambda x, i: x[i]),
    "second axis": ((3, SIZE, WIDTH), lambda x, i: x[:, i]),
    "second axis of one row": ((3, SIZE, WIDTH), lambda x, i: x[1, i]),
    "int8 index": ((300, WIDTH), lambda x, i: x[i.astype("int8")]),
    "uint8 index": ((300, WIDTH), lambda x, i: x[i.astype("uint8")]),
}


@pytest.mark.parametrize("name", PROTOCOL)
def test_without_quaxify(name, normal):
    shape, fn = PROTOCOL[name]
    q = eqquant.quantize(normal(*shape), "int8")
    assert_array_equal(at_all_indices(fn)(q), at_all_indices(fn)(q.dequantize()))


def test_a_fill_by_the_index_of_whole_rows_is_not_silent(normal):
    """A start other than 0 fills the whole row, which the parts cannot express."""
    q, dense = table(Int8(), normal)
    fn = lambda x, i: gather(x, i, "fill", 0, 1)
    with pytest.raises(eqquant.MaterialiseError):
        strict(fn)(q, jnp.int32(1))
    loose = eqquant.quaxify(fn, on_materialise="allow")
    assert_array_equal(at_all_indices(loose)(q), at_all_indices(fn)(dense))
