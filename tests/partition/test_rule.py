"""Specs and collectives of products, derived from rules and plans without arrays."""

import jax
import jax.numpy as jnp
import pytest
from eqquant.partition import (
    DOT,
    DOT_OVER_ROWS,
    partition_product,
    Plan,
    SCALE_GRADIENT,
)
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P


MESH = AbstractMesh((2, 4), ("d", "m"))
X, CODES, SCALES = (8, 256), (256, 128), (256, 4)
OUT = (8, 256)


def partition(rule, axes, shapes, out_shape, **options):
    plan = Plan(MESH, axes, ("d",), **options)
    return partition_product(rule, plan, shapes, out_shape, 32)


@pytest.mark.parametrize(
    "rule, axes, in_specs, out_spec, over",
    [
        # The outputs of a weight are split: no collective.
        (DOT, (("m",), ()), ("d,", "m,", "m,"), "d,m", ""),
        (DOT_OVER_ROWS, ((), ("m",)), ("d,", ",m", ",m"), "d,m", ""),
        # The contracted axis is split: a sum.
        (DOT, ((), ("m",)), ("d,m", ",m", ",m"), "d,", "m"),
        (DOT_OVER_ROWS, (("m",), ()), ("d,m", "m,", "m,"), "d,", "m"),
        # A mesh axis also splits the tokens: codes and scales are gathered over it.
        (DOT, (("d", "m"), ()), ("d,", "md,", "md,"), "d,m", ""),
        (DOT, (("d",), ("m",)), ("d,m", "d,m", "d,m"), "d,", "m"),
    ],
)
def test_products(rule, axes, in_specs, out_spec, over):
    found = partition(rule, axes, (X, CODES, SCALES), OUT)
    assert tuple(map(spell, found.in_specs)) == in_specs
    assert spell(found.out_spec) == out_spec
    assert found.over == found.all_reduced == tuple(over)


def spell(spec):
    return ",".join("".join(entry or "") for entry in spec)


def test_scales_of_whole_rows_are_replicated_along_the_row():
    found = partition(DOT, ((), ("m",)), (X, CODES, (256, 1)), OUT)
    assert list(map(spell, found.in_specs)) == ["d,m", ",m", ","]
    arrays = (jax.ShapeDtypeStruct(s, "f4") for s in (X, CODES, (256, 1)))
    assert [a.shape for a in found.parts(*arrays)] == [(4, 64), (256, 32), (256, 1)]


def test_a_requested_sum_is_scattered_if_parts_are_equal():
    scatter = ("m",), ()
    axes, shapes = ((), ("m",)), (X, CODES, SCALES)
    found = partition(DOT, axes, shapes, OUT, scatter=scatter)
    assert spell(found.out_spec) == "dm," and found.all_reduced == ()
    found = partition(DOT, axes, ((6, 256), *shapes[1:]), (6, 256), scatter=scatter)
    assert spell(found.out_spec) == "d," and found.all_reduced == ("m",)


@pytest.mark.parametrize("round_parts", [False, True])
@pytest.mark.parametrize("scatter", [(), ("m",)])
def test_parts_of_a_sum_are_rounded_on_request(scatter, round_parts):
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
    plan = Plan(mesh.abstract_mesh, ((), ("m",)), ("d",), scatter=(scatter, ()))
    found = partition_product(DOT, plan, (X, CODES, SCALES), OUT, 32)

    def part(x, codes, scales, dtype):
        # In bfloat16, the first part is 1.
        parts = jnp.array([1 + 2.0**-9, -1, 0, 0], dtype)
        return jnp.full((len(x), len(codes)), parts[lax.axis_index("m")])

    operands = (jnp.zeros(shape) for shape in (X, CODES, SCALES))
    with jax.set_mesh(mesh):
        fn = found.sharded(part, jnp.bfloat16, round_parts)
        out = jax.jit(fn)(*operands)
    assert out.dtype == jnp.bfloat16
    assert jnp.all(out == (0 if round_parts and not scatter else 2.0**-9))


def test_a_stack_is_split_and_parts_of_blocks_are_not():
    plan = Plan(MESH, (("m",), (), ("d",)))
    shapes = (4, 8, 96), (4, 256, 96), (4, 256, 3)
    found = partition_product(DOT, plan, shapes, (4, 8, 256), 32)
    # Three blocks have no halves.
    assert found.in_specs == (P("m", None, None),) * 3


@pytest.mark.parametrize(
    "axes, blocks, out_spec, all_reduced",
    [
        ((("m",), ()), 4, "m,", "d"),
        ((("m", "d"), ()), 4, "md,", ""),  # Each device keeps its own scales.
        ((("d",), ("m",)), 4, "d,m", ""),
        ((("d",), ("m",)), 1, "d,", "m"),
    ],
)
def test_gradients_of_scales(axes, blocks, out_spec, all_reduced):
    factors = (8, 256), (8, 256)
    found = partition(SCALE_GRADIENT, axes, (*factors, CODES), (256, blocks))
    assert spell(found.out_spec) == out_spec
    assert found.all_reduced == tuple(all_reduced)
    assert found.over == tuple(dict.fromkeys(("d", *all_reduced)))


def test_a_description_names_the_collectives():
    axes, shapes = (("d",), ("m",)), (X, CODES, SCALES)
    text = partition(DOT, axes, shapes, OUT, scatter=((), ("m",))).describe()
    assert "8 devices" in text
    assert "gathered over d" in text and "scattered over m" in text
