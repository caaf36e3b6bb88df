"""Layers of other libraries, by classes with the same names and layouts."""

import dataclasses

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array


def named(module, name="") -> type:
    """Return a decorator that gives a class the module of another library."""

    def decorate(cls):
        cls.__module__, cls.__qualname__ = module, name or cls.__name__
        return cls

    return decorate


@dataclasses.dataclass(frozen=True)
class Axis:
    name: str
    size: int


@jax.tree_util.register_pytree_with_keys_class
@named("haliax.core")
class NamedArray:
    def __init__(self, array, axes):
        self.array, self.axes = array, axes

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("array"), self.array)], self.axes

    @classmethod
    def tree_unflatten(cls, axes, children):
        return cls(*children, axes)


@named("haliax.nn.linear")
class Linear(eqx.Module):
    weight: NamedArray
    bias: Array
    In: Axis | tuple[Axis, ...] = eqx.field(static=True)


@named("haliax.nn.embedding")
class Embedding(eqx.Module):
    weight: NamedArray
    Vocab: Axis = eqx.field(static=True)


A, B, C, LAYERS = Axis("a", 8), Axis("b", 16), Axis("c", 32), Axis("layers", 3)


def array(*axes):
    shape = [axis.size for axis in axes]
    return NamedArray(jax.random.normal(jax.random.key(0), shape), axes)


@pytest.mark.parametrize(
    "contracted, axes, expected",
    [
        (A, (A, C), (-2,)),
        (C, (A, C), (-1,)),
        ((A, B), (A, B, C), (-3, -2)),
        ((B, A), (C, A, B), (-2, -1)),
        (C, (LAYERS, A, C), (-1,)),  # Stacked layers.
    ],
)
def test_linear_layers_of_haliax(contracted, axes, expected):
    """Names of axes determine their roles, in any order."""
    layer = Linear(array(*axes), jnp.ones((32, 32)), contracted)
    q = eqquant.quantize_tree(layer, "int8", min_size=1)
    assert q.weight.array.axes == expected
    assert eqx.tree_equal(q.bias, layer.bias)
    # The reference has explicit axes.
    by_hand = eqquant.quantize(layer.weight.array, "int8", axis=expected)
    assert eqx.tree_equal(q.weight.array, by_hand)


@pytest.mark.parametrize(
    "axes, expected", [((C, A), (-1,)), ((A, C), (-2,)), ((C, A, B), (-2, -1))]
)
def test_tables_of_haliax(axes, expected):
    """Rows consist of all axes except the vocabulary."""
    q = eqquant.quantize_tree(Embedding(array(*axes), C), "int8", min_size=1)
    assert q.weight.array.axes == expected


def test_a_subclass_is_found_by_the_name_of_its_base():
    class Mine(Linear):
        extra: Array

    q = eqquant.quantize_tree(
        Mine(array(A, C), jnp.ones(32), A, jnp.ones((32, 32))), "int8", min_size=1
    )
    assert q.weight.array.axes == (-2,) and not eqquant.is_quantized(q.extra)


def test_what_is_neither_a_class_nor_a_name(untyped):
    with pytest.raises(TypeError, match="register_weights: expected classes.*got 3"):
        eqquant.trees.register_weights(Linear, 3)
