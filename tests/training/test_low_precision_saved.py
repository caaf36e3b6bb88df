"""Checkpoints of models in low precision, and of their optimisers."""

from typing import Any

import eqquant
import equinox as eqx
import jax
import optax
import pytest
from eqquant.training import low_precision, quantized_state, with_rounding_key


def mlp(seed=0):
    return eqx.nn.MLP(64, 64, 128, 1, key=jax.random.key(seed))


@pytest.mark.parametrize("make", [mlp, lambda seed=0: adapted(mlp(seed))])
def test_a_file_has_the_float_weights(make, tmp_path):
    path = tmp_path / "model.safetensors"
    model = low_precision(make(), "fp8")
    eqquant.save(path, model)
    assert eqx.tree_equal(eqquant.load(path, like=make(1)), make())
    # The recipe is from `like`, as the precision of quantized arrays is.
    other = low_precision(make(1), "int8")
    assert eqx.tree_equal(eqquant.load(path, like=other), low_precision(make(), "int8"))
    abstract = eqx.filter_eval_shape(low_precision, make(), "fp8")
    assert eqx.tree_equal(eqquant.load(path, like=abstract), model)
    eqquant.save(path, make())
    assert eqx.tree_equal(eqquant.load(path, like=model), model)


def adapted(model):
    return eqquant.lora_tree(model, 4, key=jax.random.key(2))


def test_training_continues_from_a_file(tmp_path, normal):
    x, path = normal(32, 64), tmp_path / "run.safetensors"
    optimiser = quantized_state(optax.adamw(1e-2), "fp8")
    params = lambda model: eqx.filter(model, eqx.is_inexact_array)

    @eqx.filter_jit
    def step(model, state):
        gradients = eqx.filter_grad(lambda m: (jax.vmap(m)(x) ** 2).mean())(model)
        updates, state = optimiser.update(gradients, state, params(model))
        return eqx.apply_updates(model, updates), state

    model = low_precision(mlp(), "int8")
    first = step(model, optimiser.init(params(model)))
    eqquant.save(path, first)
    like = low_precision(mlp(1), "int8")
    loaded = eqquant.load(path, like=(like, optimiser.init(params(like))))
    assert eqx.tree_equal(step(*loaded), step(*first))


def test_the_key_of_a_step_is_not_saved(tmp_path):
    path = tmp_path / "model.safetensors"
    keyed = [
        with_rounding_key(low_precision(mlp(seed), "nvfp4"), jax.random.key(seed))
        for seed in (0, 1)
    ]
    eqquant.save(path, keyed[0])
    loaded = eqquant.load(path, like=keyed[1])
    weights: list[Any] = [m.layers[0].weight for m in (loaded, *keyed)]
    assert (weights[0].master == weights[1].master).all()
    assert weights[0].key == weights[2].key


def test_quantized_weights_do_not_load_into_low_precision(tmp_path):
    path = tmp_path / "model.safetensors"
    eqquant.save(path, eqquant.quantize_tree(mlp(), "nf4"))
    with pytest.raises(ValueError, match=r"layers.0.weight.*nf4.*master_weights"):
        eqquant.load(path, like=low_precision(mlp()))
