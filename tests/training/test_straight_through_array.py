"""`StraightThroughArray`: operations on both of its parts."""

import eqquant
import jax
import jax.numpy as jnp
import pytest
from eqquant.arrays import Contraction
from eqquant.training import StraightThroughArray
from helpers import assert_identical, strict
from jax.sharding import AxisType, PartitionSpec as P


def make(w, format="nf4", **options) -> StraightThroughArray:
    return StraightThroughArray(w, eqquant.quantize(w, format, **options))


def test_concatenating_joins_both_parts(normal):
    a, b = make(normal(4, 128)), make(normal(2, 128))
    join = lambda a, b: jnp.concatenate([a, b])
    joined = eqquant.quaxify(join, on_materialise="error")(a, b)
    assert_identical(joined.master, join(a.master, b.master))
    assert_identical(joined.dequantize(), join(a.dequantize(), b.dequantize()))
    assert a.concatenate([a], 1) is NotImplemented  # Along the blocked axis.
    pile = lambda a: jnp.stack([a, a])
    piled = strict(pile)(a)
    assert_identical(piled.master, pile(a.master))
    assert_identical(piled.dequantize(), pile(a.dequantize()))
    assert a.reverse((1,)) is NotImplemented


def test_both_parts_are_split_as_the_weight_is(normal):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    w = make(normal(8, 1024))
    specs = w.split_specs(P(None, "x"), mesh)
    assert specs.master == specs.q.codes == specs.q.scales == P(None, "x")
    assert make(normal(8, 128)).split_specs(P(None, "x"), mesh) is NotImplemented


def test_it_rounds_activations_as_what_it_is_quantized_to_does(normal):
    assert not make(normal(4, 64)).rounds_activations
    rounds = make(normal(4, 64), "int8", activations="int8")
    assert rounds.rounds_activations
    x = normal(3, 64)
    contraction = Contraction([(1, 1)])
    assert_identical(rounds.contract(x, contraction), rounds.q.contract(x, contraction))


@pytest.mark.parametrize("fill", [None, 0.0, jnp.nan])
def test_what_is_out_of_bounds_is_filled_in_both_parts(fill, normal):
    w = make(normal(4, 3, 64))
    take = lambda w: w.at[jnp.array([1, 9])].get(mode="fill", fill_value=fill)
    taken = strict(take)(w)
    assert_identical(taken.master, take(w.master))
    assert_identical(taken.dequantize(), take(w.dequantize()))


def test_products_have_the_dtype_that_is_asked_for(normal):
    w, x = make(normal(4, 64, dtype=jnp.bfloat16)), normal(3, 64, dtype=jnp.bfloat16)
    assert w.contract(x, Contraction([(1, 1)])).dtype == jnp.bfloat16
    assert (
        w.contract(x, Contraction([(1, 1)], out_dtype=jnp.float32)).dtype == jnp.float32
    )
