"""`QuantizedArray`: values, structure, indexing, pytree."""

import copy
import io
import pickle
import warnings

import eqquant
import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Int8, NF4
from helpers import assert_close, assert_identical, relative, strict
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P


def test_properties(normal):
    q = eqquant.quantize(normal(6, 100, dtype=jnp.bfloat16), NF4(block_size=32))
    assert (q.shape, q.ndim, q.size, q.dtype) == ((6, 100), 2, 600, jnp.bfloat16)
    assert q.nbytes == 6 * 64 + 6 * 4 * 4  # Four blocks a row, the last partial.
    assert q.format == NF4(block_size=32) and q.block_size == 32
    assert len(q) == 6
    assert repr(q) == str(q) == "nf4:bf16[6,100]"
    assert q.T.shape == q.mT.shape == (100, 6)
    assert q.astype(jnp.float32).dtype == jnp.float32
    assert q.dtype == jnp.bfloat16  # Nothing is mutated.


def test_it_is_an_immutable_module_of_its_parts(format, normal):
    q = eqquant.quantize(normal(3, 5, 64), format)
    assert isinstance(q, eqx.Module)
    leaves = jax.tree.leaves(q)
    parts = [q.codes, *jax.tree.leaves(q.scales)]
    assert len(parts) == 1 + len(jax.tree.leaves(format.no_scales((), 1)))
    assert all(x is y for x, y in zip(leaves, parts, strict=True))
    assert q.codes.shape[:-1] == q.scales.shape[:-1] == (3, 5)
    assert (
        q.codes.dtype in (jnp.uint8, jnp.int8) and q.scales.dtype == format.scale_dtype
    )
    with pytest.raises(Exception, match="frozen|assign"):
        q.codes = q.codes


def test_it_never_turns_into_an_array_by_itself(default_format, normal):
    q = eqquant.quantize(normal(8, 64), default_format)
    for fn in (
        jnp.sin,
        jnp.asarray,
        jnp.sum,
        lambda q: q + 1,
        lambda q: jnp.ones(8) * q,
    ):
        with pytest.raises(TypeError):
            fn(q)


#
# Structure is exact
#


def layouts():
    # A small set of shapes, so that tests share compiled programs.
    shapes = st.sampled_from([(3, 5), (4, 1, 3), (2, 3, 1, 4)])

    def axes(shape):
        some = st.sets(st.integers(0, len(shape) - 1), min_size=1)
        return st.tuples(st.just(shape), some.map(lambda s: tuple(sorted(s))))

    return shapes.flatmap(axes)


def make(shape, axes, format):
    w = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    q = eqquant.quantize(w, format, axis=axes)
    return q, q.dequantize()


SMALL_BLOCKS = st.sampled_from([Int8(), NF4(block_size=2), Int8(block_size=4)])


@hypothesis.settings(max_examples=5)
@hypothesis.given(layout=layouts(), format=SMALL_BLOCKS, data=st.data())
def test_transpose(layout, format, data):
    q, w = make(*layout, format)
    permutation = data.draw(st.permutations(range(q.ndim)))
    assert_identical(q.transpose(permutation).dequantize(), w.transpose(permutation))
    assert_identical(q.T.dequantize(), w.T)
    assert_identical(
        q.transpose(permutation).mT.T.dequantize(), w.transpose(permutation).mT.T
    )


@hypothesis.settings(max_examples=12)
@hypothesis.given(layout=layouts(), format=SMALL_BLOCKS, data=st.data())
def test_indexing(layout, format, data):
    q, w = make(*layout, format)

    def entry(size):
        start = st.integers(-size, size) | st.none()
        return st.one_of(
            st.integers(-size, size - 1),
            st.builds(slice, start, start, st.sampled_from([None, 1, 2])),
            st.just(slice(None)),
        )

    count = data.draw(st.integers(0, q.ndim))
    index = [data.draw(entry(size)) for size in q.shape[:count]]
    if data.draw(st.booleans()):
        index.append(Ellipsis)
    for _ in range(data.draw(st.integers(0, 2))):
        index.insert(data.draw(st.integers(0, len(index))), None)
    index = tuple(index)
    with warnings.catch_warnings():  # Some of these indices cut blocks.
        warnings.simplefilter("ignore", eqquant.arrays.MaterialiseWarning)
        got = q[index]
    assert_identical(eqquant.dequantize(got), w[index])


def test_indexing_by_arrays(default_format, normal):
    q = eqquant.quantize(normal(5, 7, 64), default_format)
    w = q.dequantize()
    for index in (
        jnp.array([3, 0, 3]),
        (jnp.array([[1], [2]]), slice(1, 4)),
        (slice(None), jnp.array([6, 6])),
        (jnp.array([1, 2]), jnp.array([0, 6])),
        np.array([-1, 2]),
        [0, 4],
        (None, jnp.array([1, 2])),
    ):
        assert_identical(
            eqquant.dequantize(q[index]),
            w[jnp.asarray(index) if isinstance(index, list) else index],
        )
    # Results are matrices.
    assert isinstance(q[jnp.array([3, 0])], eqquant.QuantizedArray)
    assert isinstance(q[0][jnp.array([3, 0])], jax.Array)  # Results are rows.


def test_indexing_by_traced_integers(format, normal):
    q = eqquant.quantize(normal(5, 7, 64), format)
    get = jax.jit(lambda q, i: q[i])
    for i in (0, 4, -1):
        assert_identical(get(q, jnp.array(i)).dequantize(), q.dequantize()[i])


@pytest.mark.parametrize(
    "index, error",
    [(5, IndexError), ((0, 0, 0), IndexError), (1.5, TypeError), ("a", TypeError)],
)
def test_bad_indices(index, error, normal):
    q = eqquant.quantize(normal(5, 64), "nf4")
    with pytest.raises(error):
        q[index]


def test_rows_come_back_as_arrays(default_format, normal):
    q = eqquant.quantize(normal(5, 64), default_format)
    assert_identical(q[2], q.dequantize()[2])
    rows = list(q)
    assert len(rows) == 5 and all(isinstance(row, jax.Array) for row in rows)


def test_reshape(default_format, normal):
    q = eqquant.quantize(normal(4, 6, 64), default_format)
    w = q.dequantize()
    for shape in ((24, 64), (2, 2, 6, 64), (2, 12, 64), (4, 1, 6, 64), (-1, 64)):
        reshaped = q.reshape(shape)
        assert isinstance(reshaped, eqquant.QuantizedArray)
        assert_identical(reshaped.dequantize(), w.reshape(shape))
    front = eqquant.quantize(normal(64, 4, 6), default_format, axis=0)
    assert_identical(
        front.reshape(64, 24).dequantize(), front.dequantize().reshape(64, 24)
    )
    with pytest.warns(eqquant.arrays.MaterialiseWarning, match="reshape"):
        assert_identical(q.reshape(4, 384), w.reshape(4, 384))
    with pytest.raises(ValueError, match="cannot reshape"):
        q.reshape(5, 5)


def test_astype(default_format, normal):
    q = eqquant.quantize(normal(4, 64), default_format)
    half = q.astype(jnp.float16)
    assert half.codes is q.codes
    assert_identical(half.dequantize(), q.dequantize().astype(jnp.float16))
    with pytest.warns(eqquant.arrays.MaterialiseWarning, match="int32"):
        assert q.astype(jnp.int32).dtype == jnp.int32


#
# from_components
#


def test_from_components(format, normal):
    for axis, size in ((-1, 100), (1, 4), ((0, 2), (3, 100))):
        q = eqquant.quantize(normal(3, 4, 100), format, axis=axis)
        again = eqquant.arrays.from_components(
            q.codes, q.scales, format, dtype=q.dtype, axis=axis, size=size
        )
        assert_identical(again, q)


def test_from_components_checks_what_it_gets(normal):
    q = eqquant.quantize(normal(4, 128), "nf4")

    def load(codes=q.codes, scales=q.scales, format="nf4", **kwargs):
        return eqquant.arrays.from_components(codes, scales, format, **kwargs)

    assert_identical(load(), q)
    with pytest.raises(Exception, match="lead|scales"):
        load(scales=q.scales[:2])
    with pytest.raises(ValueError, match="scales must have 2 blocks.*got 1"):
        load(scales=q.scales[:, :1])
    with pytest.raises(ValueError, match="codes hold 128 values.*stores 256"):
        load(size=200)
    with pytest.raises(TypeError, match="codes.*must be int8, got uint8"):
        load(format="int8")
    with pytest.raises(TypeError, match="scales must be float32.*got bfloat16"):
        load(scales=q.scales.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match="dtype must be floating point, got int32"):
        load(dtype="int32")
    with pytest.raises(ValueError, match="axis must"):
        load(axis=3)
    with pytest.raises(ValueError, match="size"):
        load(axis=(0, 1))
    with pytest.raises(ValueError, match="size must give 1"):
        load(size=(4, 32))


#
# Pytree operations
#


def test_shape_is_derived_from_the_leaves(format, normal):
    q = eqquant.quantize(normal(3, 5, 64), format)
    first = jax.tree.map(lambda x: x[0], q)
    assert first.shape == (5, 64)
    assert_identical(first.dequantize(), q.dequantize()[0])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), first, first)
    assert stacked.shape == (2, 5, 64)


def test_filter_vmap_over_stacked_weights(format, normal):
    w = normal(3, 5, 64)
    q = eqx.filter_vmap(lambda w: eqquant.quantize(w, format))(w)
    assert_identical(q, eqquant.quantize(w, format))
    rows = eqx.filter_vmap(lambda q: q.dequantize())(q)
    assert_identical(rows, q.dequantize())


def test_scan_over_stacked_layers(default_format, normal):
    q = eqquant.quantize(normal(3, 64, 64) / 8, default_format)
    x = normal(64)

    def run(weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(w @ x), None), x, weights)[0]

    assert relative(run(q), run(q.dequantize())) < 1e-4


def test_serialisation(format, normal):
    q = {"w": eqquant.quantize(normal(5, 100), format)}
    buffer = io.BytesIO()
    eqx.tree_serialise_leaves(buffer, q)
    buffer.seek(0)
    skeleton = eqx.filter_eval_shape(lambda: jax.tree.map(jnp.zeros_like, q))
    assert_identical(eqx.tree_deserialise_leaves(buffer, skeleton), q)


def test_pickle_deepcopy_and_tree_at(format, normal):
    q = eqquant.quantize(normal(5, 100), format)
    assert_identical(pickle.loads(pickle.dumps(q)), q)
    assert_identical(copy.deepcopy(q), q)
    if format.quantized_scales:
        return
    doubled = eqx.tree_at(lambda q: q.scales, q, q.scales * 2)
    assert_identical(doubled.dequantize(), q.dequantize() * 2)


def test_filter_jit_donation_and_sharding(default_format, normal):
    q = eqquant.quantize(normal(16, 64), default_format)
    expected = q.dequantize()
    assert_identical(eqx.filter_jit(lambda q: q.dequantize())(q), expected)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = eqx.filter_shard(q, NamedSharding(mesh, P("x")))
    assert split.codes.sharding.spec == P("x")
    assert_identical(split.dequantize(), expected)
    donated = jax.jit(lambda q: jax.tree.map(jnp.copy, q), donate_argnums=0)
    assert_identical(donated(copy.deepcopy(q)), q)


@pytest.mark.parametrize(
    "change", [{"precision": "highest"}, {"format": NF4(scale_dtype="bfloat16")}]
)
def test_format_and_compute_are_part_of_the_structure(change, normal):
    w = normal(4, 64)
    a, b = (eqquant.quantize(w, **options) for options in ({}, change))
    assert jax.tree.structure(a) != jax.tree.structure(b)
    traces = []
    count = jax.jit(lambda q: traces.append(0) or q.scales)
    count(a), count(a), count(b)
    assert len(traces) == 2


def test_indices_are_bounded_by_their_own_axis(normal):
    q = eqquant.quantize(normal(2, 5, 64), "nf4")
    assert_identical(q[1, 4], q.dequantize()[1, 4])
    for index in ((0, 5), (0, -6), (2, 0)):
        with pytest.raises(IndexError, match="out of bounds"):
            q[index]


def test_a_part_of_one_block_is_decoded(normal):
    q = eqquant.quantize(normal(8, 32), eqquant.Int8(block_size=32))
    cut = lambda q: lax.slice(q, (0, 0), (8, 16))
    with pytest.raises(eqquant.MaterialiseError):
        strict(cut)(q)
    decoded = eqquant.quaxify(cut, on_materialise="allow")(q)
    assert_identical(decoded, q.dequantize()[:, :16])


def test_stacks_from_both_sides(normal):
    q = eqquant.quantize(normal(3, 24, 64), "int8")
    for x, product in (
        (normal(3, 5, 24), lambda a, q: a @ q),
        (normal(3, 64, 5), lambda a, q: q @ a),
    ):
        assert_close(product(x, q), product(x, q.dequantize()))


def test_what_decodes_does_not_round_activations(normal):
    q = eqquant.quantize(normal(4, 8, 64), "int8", axis=0)
    x = normal(4, 64, 3)
    with pytest.warns(eqquant.arrays.MaterialiseWarning):
        got = q @ x
    assert_identical(got, q.dequantize() @ x)


def test_an_array_and_a_slice_decode_nothing(normal):
    q = eqquant.quantize(normal(4, 5, 64), "nf4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = q[jnp.array([2, 0]), 1:3]
    assert_identical(rows.dequantize(), q.dequantize()[jnp.array([2, 0]), 1:3])
