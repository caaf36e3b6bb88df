"""Compiled programs quantize sharded floats, and merge adapters, in place."""

import eqquant
import equinox as eqx
import jax
import numpy as np
import pytest
from collectives import collectives, largest_float
from helpers import pairs, slow
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


SIZE = 256
KINDS = [AxisType.Auto, AxisType.Explicit]
SPECS = [P(None, "m"), P("m"), P("d", "m")]
MOVES = {"all-gather", "all-to-all", "collective-permute", "reduce-scatter"}


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("d", "m"), axis_types=(kind,) * 2)


@pairs("kind, spec, format", KINDS, SPECS, ["int8", "nf4"])
def test_quantize(kind, spec, format, normal):
    mesh, w = mesh_of(kind), normal(SIZE, SIZE)
    expected = eqquant.quantize(w, format)
    with jax.set_mesh(mesh):
        split = jax.device_put(w, NamedSharding(mesh, spec))
        fn = jax.jit(lambda w: eqquant.quantize(w, format))
        compiled = fn.lower(split).compile()
        got = compiled(split)
    # All devices need the largest value of a row, and whether all values are finite.
    assert not {op for op, _ in collectives(compiled)} & MOVES
    assert largest_float(compiled) <= w.size / 4
    assert got.codes.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    np.testing.assert_array_equal(got.codes, expected.codes)


@pytest.mark.parametrize("kind", [AxisType.Explicit, slow(AxisType.Auto)])
@pytest.mark.parametrize("spec", [P(None, "m"), slow(P("d", "m"))])
def test_merge_lora(kind, spec):
    mesh = mesh_of(kind)
    layer = eqx.nn.Linear(SIZE, SIZE, key=jax.random.key(0))
    layer = eqquant.quantize_tree(layer, "nf4")

    def adapt(layer):
        layer = eqquant.lora_tree(layer, rank=4, key=jax.random.key(1))
        # Initially the adapter is zero, so a merge would have no effect.
        return eqx.tree_at(
            lambda layer: layer.weight.b, layer, replace_fn=lambda b: b + 1
        )

    expected, errors = eqquant.merge_lora(adapt(layer), "nf4")
    split = eqquant.shard_tree(adapt(layer), mesh, rules={"weight": spec}, batch="d")
    parts, static = eqx.partition(split, eqx.is_array)
    with jax.set_mesh(mesh):
        merge = lambda parts: eqquant.merge_lora(eqx.combine(parts, static)).weight
        compiled = jax.jit(merge).lower(parts).compile()
        merged, report = eqquant.merge_lora(split, "nf4")
    assert not {op for op, _ in collectives(compiled)} & MOVES
    assert largest_float(compiled) <= SIZE * SIZE / 4
    np.testing.assert_array_equal(merged.weight.codes, expected.weight.codes)
    assert merged.weight.plan == split.weight.base.plan
    got, of_one = (np.array(rows.rows[0].relative_error) for rows in (report, errors))
    assert 0 < got < 1 and abs(got - of_one) < 1e-6


def test_in_shardings(normal):
    mesh = mesh_of(AxisType.Auto)
    q, x = eqquant.quantize(normal(SIZE, SIZE), "int8"), normal(8, SIZE)
    q = q.with_plan(eqquant.shard_tree(q, mesh, P("m"), batch="d").plan)
    where = tuple(NamedSharding(mesh, spec) for spec in (P("d"), P("m")))
    compiled = jax.jit(lambda x, q: x @ q.T, in_shardings=where).lower(x, q).compile()
    assert not collectives(compiled) and largest_float(compiled) < q.size / 4
