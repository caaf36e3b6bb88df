"""Replacement of rows in a quantized array over 8 devices."""

import eqquant
import jax
import numpy as np
import pytest
from collectives import collectives, largest_float
from eqquant import Int8, NF4
from helpers import pairs, strict
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


ROWS, SIZE, IDS = 16, 256, np.array([3, 1, 8, 15], np.int32)
SPECS = [P("m"), P(None, "m"), P(("m", "d")), P("d", "m")]


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("d", "m"), axis_types=(kind,) * 2)


def replace(cache, rows, ids, **how):
    return cache.at[ids].set(rows, **how)


def assert_same_parts(got, expected):
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_array_equal(a, b)


def put(x, mesh):
    return jax.device_put(x, NamedSharding(mesh, P()))


@pairs(
    "kind, spec, format",
    [AxisType.Auto, AxisType.Explicit],
    SPECS,
    [Int8(), NF4(), NF4(double_quantization=True)],
)
def test_codes_are_those_of_one_device(kind, spec, format, normal):
    mesh, rows = mesh_of(kind), normal(len(IDS), SIZE)
    cache = eqquant.quantize(normal(ROWS, SIZE), format)
    split = eqquant.shard_tree(cache, mesh, spec, batch="d")
    how = {"out_sharding": spec} if kind == AxisType.Explicit else {}
    with jax.set_mesh(mesh):
        args = split, put(rows, mesh), put(IDS, mesh)
        fn = jax.jit(lambda *args: strict(replace)(*args, **how))
        compiled = fn.lower(*args).compile()
        got = compiled(*args)
    assert_same_parts(got, strict(replace)(cache, rows, IDS))
    assert got.plan == split.plan
    for new, old in zip(*map(jax.tree.leaves, (got, split)), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
    # New rows may move as floats. Codes of other rows do not move.
    assert largest_float(compiled) <= rows.size
    assert not {("all-gather", "u8"), ("all-gather", "s8")} & collectives(compiled)


def test_dense_arrays_have_to_say_how_as_well(normal):
    mesh = mesh_of(AxisType.Explicit)
    dense, rows = normal(ROWS, SIZE), normal(len(IDS), SIZE)
    with jax.set_mesh(mesh):
        others = put(rows, mesh), put(IDS, mesh)
        split = jax.device_put(dense, NamedSharding(mesh, P("m")))
        with pytest.raises(Exception, match="out_sharding") as of_dense:
            replace(split, *others)
        split = eqquant.shard_tree(eqquant.quantize(dense, "int8"), mesh, P("m"))
        with pytest.raises(type(of_dense.value), match="out_sharding"):
            strict(replace)(split, *others)


@pytest.mark.slow
def test_inside_of_automatic_axes(normal):
    mesh, rows = mesh_of(AxisType.Explicit), normal(len(IDS), SIZE)
    cache = eqquant.quantize(normal(ROWS, SIZE), "int8")

    def loop(cache, rows, ids):
        step = lambda i, c: lax.dynamic_update_index_in_dim(c, rows[i], ids[i], 0)
        return lax.fori_loop(0, len(IDS), step, cache)

    split = eqquant.shard_tree(cache, mesh, P("m"))
    fn = jax.sharding.auto_axes(loop, out_sharding=P("m"))
    with jax.set_mesh(mesh):
        got = jax.jit(strict(fn))(split, put(rows, mesh), put(IDS, mesh))
    assert_same_parts(got, strict(loop)(cache, rows, IDS))
    assert jax.typeof(got.codes).sharding.spec == P("m", None)


def test_another_split(normal):
    mesh = mesh_of(AxisType.Explicit)
    q = eqquant.quantize(normal(ROWS, SIZE), "nf4")
    split = eqquant.shard_tree(q, mesh, P("m"))
    fn = strict(lambda q: jax.sharding.reshard(q, P("d", "m")))
    with jax.set_mesh(mesh):
        got = jax.jit(fn)(split)
        through_a_block = strict(lambda q: jax.sharding.reshard(q, P(None, ("d", "m"))))
        with pytest.raises(eqquant.MaterialiseError, match="reshard"):
            through_a_block(split)
    assert_same_parts(got, q)
    assert jax.typeof(got.codes).sharding.spec == P("d", "m")
