"""Counts of values that low-precision products cannot represent."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from eqquant.debug import saturated
from eqquant.training import low_precision, Recipe


def loss(model, x):
    return jnp.sum(jax.vmap(model)(x) ** 2)


def layer(key=0):
    return eqx.nn.Linear(64, 32, use_bias=False, key=jax.random.key(key))


def by_operand(counts):
    return {(c.product, c.operand): c for c in counts}


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["int8", "fp8", "mxfp8"])
def test_no_finite_value_saturates(preset, normal):
    """The largest float32 numbers do not become infinite either."""
    x = normal(48, 64).at[3, 5].set(3e38)
    model = low_precision(layer(), preset)
    # The loss is linear, because a square would overflow before it is rounded.
    gradient = eqx.filter_grad(lambda m, x: jnp.sum(jax.vmap(m)(x * 1e-3)))
    found = by_operand(saturated(gradient, model, x))
    activation = found["forward", "activation"]
    assert activation.shape == (32, 64) and activation.values == x.size
    # A row with an outlier, or a block of 32, loses its other values.
    assert activation.lost >= (31 if preset == "mxfp8" else 60)
    assert all(c.saturated == c.not_finite == 0 for c in found.values())
    assert jnp.isfinite(gradient(model, x).weight.master).all()
    assert {key[0] for key in found} >= {"forward", "wgrad"}


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_values_that_are_not_finite_are_counted(bad, normal):
    x = normal(48, 64).at[3, 5].set(bad)
    found = by_operand(
        saturated(
            eqx.filter_jit(eqx.filter_grad(loss)), low_precision(layer(), "fp8"), x
        )
    )
    assert found["forward", "activation"].not_finite == 1
    # A row of outputs is NaN, and so is its gradient.
    assert found["wgrad", "gradient"].not_finite == 32


@pytest.mark.slow
def test_saturated_values_equal_numpy(normal):
    x = normal(48, 64)
    model = low_precision(layer(), Recipe("nvfp4"))
    found = by_operand(saturated(eqx.filter_grad(loss), model, x))
    unit = np.abs(x).max() / (6 * 448)
    blocks = np.asarray(x / unit, np.float64).reshape(48, 4, 16)
    most = np.abs(blocks).max(-1, keepdims=True)
    scale = (most / 6).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    expected = (np.abs(blocks) > 6 * scale * (1 + 2**-20)).sum()
    assert expected > 10
    assert found["forward", "activation"].saturated == expected
    lost = (np.abs(blocks / scale) < 0.25).sum()
    assert abs(found["forward", "activation"].lost - lost) <= 2  # Ties.


def test_a_whole_step_with_adapters_and_a_scan(normal):
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(32, 32, key=key))(
        jax.random.split(jax.random.key(0), 3)
    )
    stack = low_precision(stack, "fp8", where=lambda a: a.ndim == 3)
    optimiser = optax.adam(1e-3)
    state = optimiser.init(eqx.filter(stack, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(stack, state, x):
        def value(stack):
            arrays, static = eqx.partition(stack, eqx.is_array)
            run = lambda x, a: (jax.vmap(eqx.combine(a, static))(x), None)
            return jnp.sum(jax.lax.scan(run, x, arrays)[0] ** 2)

        gradients = eqx.filter_grad(value)(stack)
        updates, state = optimiser.update(gradients, state)
        return eqx.apply_updates(stack, updates), state

    counts = saturated(step, stack, state, normal(8, 32))
    assert {c.path for c in counts} == {"weight"}
    found = by_operand(counts)
    assert found["dgrad", "gradient"].values == 3 * 8 * 32
    adapted = eqquant.lora_tree(layer(), 4, key=jax.random.key(1))
    adapted = low_precision(adapted, "int8")
    found = by_operand(saturated(eqx.filter_jit(loss), adapted, normal(8, 64)))
    assert set(found) == {("forward", "activation"), ("forward", "weight")}


def test_weights_of_one_shape_are_counted_apart(normal):
    """The infinity is in the second layer only, and the optimiser's moments have the
    paths of the model."""
    model = low_precision([layer(), layer(1), layer(2)], "int8")
    optimiser = optax.adam(1e-3)
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(state, model, x):
        def value(model):
            first, second, third = model
            return (
                loss(first, x) + loss(second, x.at[0, 0].set(jnp.inf)) + loss(third, x)
            )

        gradients = eqx.filter_grad(value)(model)
        updates, state = optimiser.update(gradients, state)
        return eqx.apply_updates(model, updates), state

    counts = saturated(step, state, model, normal(8, 64))
    activations = [c for c in counts if c.operand == "activation"]
    assert len(activations) == 3
    assert [c.path for c in activations] == ["0.weight", "1.weight", "2.weight"]
    assert [c.not_finite for c in activations] == [0, 1, 0]
    closed = saturated(lambda x: loss(model[0], x), normal(8, 64))
    assert {c.path for c in closed} == {""}


def test_weights_that_a_function_combines_have_no_path(normal):
    model = low_precision([layer(), layer(1)], "int8")

    def averaged(model, x):
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *model)
        return loss(mean, x)

    assert {c.path for c in saturated(averaged, model, normal(8, 64))} == {""}
    # An error of the function itself is not hidden.
    with pytest.raises(TypeError, match="of the function"):
        saturated(_failing, model, normal(8, 64))


def _failing(model, x):
    raise TypeError("of the function")


def test_a_model_without_low_precision_is_an_error(normal):
    with pytest.raises(ValueError, match="no array.*low_precision"):
        saturated(loss, layer(), normal(8, 64))
