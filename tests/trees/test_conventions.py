"""The weights of known layers, and the reasons for other arrays."""

import dataclasses
import re

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.trees import _conventions
from helpers import assert_close
from jaxtyping import Array


KEY = jax.random.key(0)


def floats(*shape):
    return jax.random.normal(KEY, shape)


def axes_of(tree) -> dict:
    """Return the blocked axes of quantized arrays by path."""
    quantized = eqquant.quantize_tree(tree, "int8")
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        quantized, is_leaf=eqquant.is_quantized
    )
    paths = [row.path for row in eqquant.report(quantized).rows]
    return {
        path: leaf.axes
        for path, (_, leaf) in zip(paths, leaves, strict=True)
        if eqquant.is_quantized(leaf)
    }


def test_dictionaries_of_flax():
    """The bias determines the output axes."""
    attention = {
        "query": {"kernel": floats(64, 4, 16), "bias": floats(4, 16)},
        "out": {"kernel": floats(4, 16, 64), "bias": floats(64)},
    }
    general = {"kernel": floats(3, 9, 4, 8), "bias": floats(4, 8)}
    params = {
        "attention": attention,
        "general": general,
        "conv": {"kernel": floats(3, 3, 4, 8), "bias": floats(8)},
        "depth": {"kernel": floats(2, 64, 32), "bias": floats(2, 32)},
        "dense": {"kernel": floats(64, 32)},
        "embed": {"embedding": floats(100, 64)},
        "norm": {"scale": floats(512)},
    }
    assert axes_of({"params": params}) == {
        "params.attention.query.kernel": (-3,),
        "params.attention.out.kernel": (-3, -2),
        "params.general.kernel": (-4, -3),
        "params.conv.kernel": (-4, -3, -2),
        "params.depth.kernel": (-2,),
        "params.dense.kernel": (-2,),
        "params.embed.embedding": (-1,),
    }
    unclear = {"kernel": floats(64, 4, 16)}
    with pytest.warns(UserWarning, match="only a rule can tell"):
        assert axes_of({"query": unclear, "b": floats(4, 64)}) == {}


def test_dictionaries_of_haiku_and_pairs_of_stax():
    haiku = {"mlp/~/linear_0": {"w": floats(64, 32), "b": floats(32)}}
    assert axes_of(haiku) == {"mlp/~/linear_0.w": (-2,)}
    stax = [(floats(3, 3, 8, 8), floats(1, 1, 1, 8)), (), (floats(392, 32), floats(32))]
    assert axes_of(stax) == {"0.0": (-4, -3, -2), "2.0": (-2,)}
    with pytest.warns(UserWarning, match="nothing was chosen"):
        assert axes_of((floats(64, 32), floats(64))) == {}  # Not a layer.


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Held:
    """A wrapper like NamedArray, without a name for its child."""

    array: Array

    def tree_flatten(self):
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_an_object_may_stand_for_the_array(monkeypatch):
    held = f"{__name__}.Held"
    monkeypatch.setitem(_conventions._holders, held, "array")
    linear = eqx.nn.Linear(64, 32, key=KEY)
    model = eqx.tree_at(lambda m: m.weight, linear, Held(linear.weight))
    assert axes_of(model) == {"weight.array": (-1,)}
    rules = {"weight.array": "nf4"}
    model = eqquant.quantize_tree(model, rules=rules)
    assert model.weight.array.format == eqquant.NF4()


@pytest.fixture
def conventions(monkeypatch):
    monkeypatch.setattr(_conventions, "_conventions", [*_conventions._conventions])


class Dense(eqx.Module):
    kernel: Array
    offset: Array
    table: Array


class Sub(Dense):
    pass


@pytest.mark.parametrize("layer", [Dense, f"{__name__}.Dense"])
def test_a_convention_of_the_user(conventions, layer):
    @eqquant.trees.register_weights(layer)
    def _(layer, name, array):
        assert getattr(layer, name) is array
        if name == "table":
            return "a table of constants"
        return eqquant.trees.WeightAxes(-2, -1) if name == "kernel" else None

    model = Sub(floats(64, 32), floats(32, 32), floats(64, 64))
    assert axes_of(model) == {"kernel": (-2,)}
    rows = {row.path: row.reason for row in eqquant.report(model).rows}
    assert rows["table"] == "a table of constants"
    assert rows["offset"] == "not the weight of a known layer"
    adapted = eqquant.lora_tree(model, 2, key=KEY)
    assert adapted.kernel.in_axes == (-2,) and adapted.kernel.out_axes == (-1,)
    # The last registration is tried first.
    eqquant.trees.register_weights(Sub)(lambda layer, name, array: None)
    assert axes_of(Dense(*jax.tree.leaves(model))) == {"kernel": (-2,)}
    with pytest.warns(UserWarning, match="nothing was chosen"):
        assert axes_of(model) == {}


def test_a_warning_says_why_nothing_was_chosen():
    tree = {"big": floats(64, 64), "bias": floats(512), "other": floats(20, 20)}
    lines = "big .64, 64.: not the weight of a known layer\n  bias .512,.: a bias\n"
    with pytest.warns(UserWarning, match=lines) as caught:
        eqquant.quantize_tree(tree)
    (warning,) = caught
    assert warning.filename == __file__
    rule = re.search(r"rules=(\{.*\})", str(warning.message))
    assert rule is not None and rule[1] == "{'big': 'int8'}"
    out = eqquant.quantize_tree(tree, rules={"big": "int8"})
    assert eqquant.is_quantized(out["big"])
    # The model contains quantized arrays, so there is no warning.
    eqquant.quantize_tree(out)
    eqquant.quantize_tree(tree, None)  # No quantization was requested.


def test_wildcards_leave_integers_alone():
    tree = {
        "w": floats(64, 64),
        "ids": jnp.ones((64, 64), int),
        "on": np.ones((8, 8)) > 0,
    }
    out = eqquant.quantize_tree(tree, rules={"*": "nf4"})
    assert eqquant.is_quantized(out["w"])
    assert out["ids"] is tree["ids"] and out["on"] is tree["on"]
    with pytest.raises(TypeError, match="at ids"):
        eqquant.quantize_tree(tree, rules={"ids": "nf4"})


def test_adapters_of_what_is_smaller_than_the_rank_or_quantized_by_a_rule():
    class Model(eqx.Module):
        layers: list
        mine: Array

    layers = [eqx.nn.Linear(64, n, key=KEY) for n in (32, 4)]
    model = Model(layers, floats(64, 64))
    with pytest.warns(
        UserWarning, match=r"smaller than the rank, 8: \['layers.1.weight"
    ):
        adapted = eqquant.lora_tree(model, 8, key=KEY)
    assert eqquant.is_quantized(adapted.layers[1].weight) is False
    assert isinstance(adapted.layers[0].weight, eqquant.arrays.LoraArray)
    assert adapted.mine is model.mine
    quantized = eqquant.quantize_tree(model, None, rules={"mine": ("nf4", 0)})
    adapted = eqquant.lora_tree(quantized, 2, key=KEY)
    assert adapted.mine.in_axes == (-2,)
    with pytest.raises(ValueError, match="at layers.1.weight: rank 8 is larger"):
        eqquant.lora_tree(model, 2, key=KEY, rules={"layers.1.weight": 8})


class CopyOfLinear(eqx.Module):
    """A linear layer that calls JAX, with the fields of `eqx.nn.Linear`."""

    weight: jax.Array
    in_features: int
    out_features: int

    def __call__(self, x):
        return jnp.einsum("...i,io->...o", x, self.weight)


def test_a_linear_layer_is_recognised_by_its_fields(normal):
    layer, x = CopyOfLinear(normal(64, 32), 64, 32), normal(3, 64)
    quantized = eqquant.quantize_tree({"layer": layer}, "int8")["layer"]
    assert quantized.weight.axes == (-2,) and isinstance(quantized, CopyOfLinear)
    dense = eqquant.dequantize_tree(quantized)
    assert type(dense) is CopyOfLinear
    assert_close(quantized(x), dense(x), 1e-4)
    # The sizes do not fit, so the fields are no evidence.
    other = CopyOfLinear(normal(64, 32), 64, 64)
    with pytest.warns(UserWarning, match="nothing was chosen"):
        assert not eqquant.is_quantized(eqquant.quantize_tree(other).weight)
