"""Averages of quantized models."""

from typing import Any

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_identical, relative


def make(seed, format="int8") -> Any:
    model = eqx.nn.MLP(32, 8, 32, 1, key=jax.random.key(seed))
    return eqquant.quantize_tree(model, format)


def test_averages_are_those_of_the_weights():
    models = [make(0), make(1), make(2)]
    got: Any = eqquant.trees.average_trees(models, [0.5, 0.25, 0.25])
    assert jax.tree.structure(got) == jax.tree.structure(models[0])
    first, *others = (model.layers[0] for model in models)
    mean = lambda get: 0.5 * get(first) + 0.25 * sum(map(get, others))
    # Rounding to int8.
    expected = mean(lambda layer: layer.weight.dequantize())
    assert relative(got.layers[0].weight.dequantize(), expected) < 1e-2
    assert relative(got.layers[0].bias, mean(lambda layer: layer.bias)) < 1e-6


@pytest.mark.parametrize("format", ["nf4", "mxfp4", "ternary"])
def test_the_average_of_equal_models_is_the_model(format):
    model = {"w": eqquant.quantize(jnp.ones((4, 64)), format, axis=0), "n": 3}
    got = jax.jit(lambda q: eqquant.trees.average_trees([q, q]))(model["w"])
    assert_identical(got, model["w"])
    assert eqquant.trees.average_trees([model])["n"] == 3


def test_bad_arguments():
    average, model = eqquant.trees.average_trees, make(0)
    with pytest.raises(ValueError, match="models"):
        average([])
    with pytest.raises(ValueError, match="structure"):
        average([model, make(0, "nf4")])
    with pytest.raises(ValueError, match="weights"):
        average([model], [0.5, 0.5])
    adapted = eqquant.lora_tree(model, 2, key=jax.random.key(0))
    with pytest.raises(TypeError, match="merge_lora"):
        average([adapted])
