"""Optimiser states in 8 and 4 bits."""

from typing import Any

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eqquant.training import quantized_state, QuantizedMoment
from eqquant.training._quantized_state import _FORMATS, _quantized
from helpers import assert_identical, relative, slow
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


SIZE = 96


def moments(state):
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, QuantizedMoment))
    return [x for x in leaves if isinstance(x, QuantizedMoment)]


@pytest.mark.parametrize(
    "format, error", [("fp8", 0.03), ("int8", 0.01), ("fp4", 0.13)]
)
def test_the_error_of_each_format(format, error, normal):
    x = normal(32, 300).at[0].set(0)
    first, second = _FORMATS[format]
    got = _quantized(x, first, False, 64, None).dequantize()
    assert relative(got, x) < error
    squares = x**2
    got = _quantized(squares, second, True, 64, None).dequantize()
    assert relative(jnp.sqrt(got), jnp.abs(x)) < max(error, 0.02)
    assert (got[0] == 0).all()
    assert (got[1:] > 0).all()


@pytest.mark.parametrize("format", ["fp8", "int8", "fp4"])
def test_all_codes_decode_to_distinct_numbers_and_back(format):
    for numbers in _FORMATS[format]:
        codes = jnp.arange(2**numbers.bits, dtype=jnp.uint8)
        values = np.asarray(numbers.decode(codes))
        inside = np.abs(values) <= numbers.largest
        assert len(set(values)) >= len(values) - 1  # Zero may have two signs.
        back = np.asarray(
            numbers.decode(numbers.encode(jnp.asarray(values), jnp.round))
        )
        np.testing.assert_array_equal(back[inside], values[inside])


@pytest.mark.parametrize("format", ["fp8", slow("int8"), slow("fp4")])
def test_a_slow_average_keeps_moving(format, normal):
    """Rounding to nearest would not change a moment that decays by 0.1% per step."""
    optimiser = quantized_state(optax.scale_by_adam(b2=0.999), format, min_size=1)
    params = jnp.zeros((64, 128))
    state = optimiser.init(params)
    _, state = optimiser.update(jnp.ones_like(params), state)
    zero = jnp.zeros_like(params)

    def step(state, _):
        return optimiser.update(zero, state)[1], None

    state, _ = jax.lax.scan(step, state, None, length=200)
    expected = 0.001 * 0.999**200
    got = moments(state)[1].dequantize()
    assert abs(float(got.mean()) / expected - 1) < 0.05


def problem():
    """Return a loss whose gradients have very different magnitudes."""
    scales = jnp.logspace(-4, 0, SIZE)
    target = jax.random.normal(jax.random.key(0), (SIZE, SIZE))
    return lambda w: jnp.mean((scales * (w - target)) ** 2), jnp.zeros((SIZE, SIZE))


def trained(optimiser, steps=150):
    loss, params = problem()

    def step(carry, _):
        params, state = carry
        updates, state = optimiser.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), loss(params)

    (params, _), losses = jax.lax.scan(
        step, (params, optimiser.init(params)), None, length=steps
    )
    return params, losses


def test_plain_int8_second_moments_destroy_adam():
    """Small second moments become zero, and their updates as large as 1 / epsilon."""

    def to_int8(state):
        scale = jnp.max(state.nu) / 127
        nu = jnp.round(state.nu / jnp.where(scale > 0, scale, 1)) * scale
        return state._replace(nu=nu)

    adam = optax.scale_by_adam()

    def update(updates, state, params=None):
        updates, state = adam.update(updates, state, params)
        return updates, to_int8(state)

    plain = optax.GradientTransformation(adam.init, update)
    _, losses = trained(optax.chain(plain, optax.scale(-0.05)))
    assert not losses[-1] < losses[0]  # It may be NaN.


@pytest.mark.parametrize("format, slack", [("fp8", 0.1), ("int8", 0.1), ("fp4", 0.5)])
def test_training_is_close_to_float32_states(format, slack):
    optimiser = optax.adam(0.05)
    _, exact = trained(optimiser)
    _, losses = trained(quantized_state(optimiser, format))
    assert exact[-1] < exact[0] / 100
    assert losses[-1] < exact[-1] + slack * exact[0] / 100


def test_bytes_of_a_model_with_a_billion_weights():
    layers, width, hidden, vocabulary = 22, 2048, 5632, 32000
    shapes = {
        "attention": (layers, 4, width, width),
        "mlp": (layers, 3, hidden, width),
        "table": (vocabulary, width),
        "norms": (layers, 2, width),
    }
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
    weights = sum(x.size for x in jax.tree.leaves(params))
    assert weights > 1.1e9
    expected_of: dict[Any, float] = {"fp8": 2.04, "fp4": 1.07}
    for format, expected in expected_of.items():
        optimiser = quantized_state(optax.adamw(1e-3), format)
        state = jax.eval_shape(optimiser.init, params)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        assert size / weights < expected


def test_a_short_last_axis_is_not_padded(normal):
    """The factors of adapters have 8 values in a row, and blocks have 256."""
    x = normal(2048, 8)
    first, _ = _FORMATS["fp8"]
    assert eqx.tree_equal(*(_quantized(x, first, False, n, None) for n in (256, 8)))
    optimiser = quantized_state(optax.adam(1e-3), "fp8")
    update = jax.jit(optimiser.update).lower(x, optimiser.init(x)).compile()
    # Padded rows take 32 times the bytes of `x`.
    assert update.memory_analysis().temp_size_in_bytes < 16 * x.nbytes


def test_states_are_saved_and_donated(tmp_path, normal):
    params = {"w": normal(64, 128), "b": normal(8)}
    optimiser = quantized_state(optax.adamw(1e-2))
    state = optimiser.init(params)
    assert len(moments(state)) == 2  # Small arrays stay in floating point.
    step = jax.jit(optimiser.update, donate_argnums=1)
    _, state = step(params, state, params)
    eqx.tree_serialise_leaves(tmp_path / "state.eqx", state)
    loaded = eqx.tree_deserialise_leaves(tmp_path / "state.eqx", optimiser.init(params))
    for a, b in zip(*map(jax.tree.leaves, (state, loaded)), strict=True):
        assert_identical(a, b)
    before = jax.tree.leaves(moments(state))
    step(params, state, params)
    assert all(x.is_deleted() for x in before)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_states_are_split_like_the_weight(kind, normal):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    optimiser = quantized_state(optax.adam(1e-2), block_size=32)
    w, g = normal(64, 256), normal(64, 256)
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P("d")))
    with jax.set_mesh(mesh):
        state = jax.jit(optimiser.init)(put(w))
        updates, state = jax.jit(optimiser.update)(put(g), state, put(w))
    expected, alone = jax.jit(optimiser.update)(g, optimiser.init(w), w)
    assert relative(updates, expected) < 1e-6
    for split, whole in zip(moments(state), moments(alone), strict=True):
        np.testing.assert_array_equal(split.codes, whole.codes)
        sharding: Any = split.codes.sharding
        assert sharding.spec[0] == "d"


def test_bad_arguments(normal):
    w = normal(64, 128)
    optimiser = quantized_state(optax.adam(1e-2))
    with pytest.raises(ValueError, match="from `init`.*got tuple"):
        optimiser.update(w, optax.adam(1e-2).init(w))
    with pytest.raises(ValueError, match="another tree"):
        optimiser.update(normal(32, 32), optimiser.init(w))
    # Two trees that share a shape, and another format.
    with pytest.raises(ValueError, match=r"mu\['b'\].* has the shape None"):
        optimiser.update({"a": w, "b": w}, optimiser.init({"a": w}))
    with pytest.raises(ValueError, match=r"codes has the shape \(64, 64\)"):
        optimiser.update(w, quantized_state(optax.adam(1e-2), "fp4").init(w))
    with pytest.raises(ValueError, match="block_size must be 2 or more, got 1"):
        quantized_state(optax.adam(1e-2), block_size=1)
    with pytest.raises(TypeError, match="format is 'int4'.*'fp8', 'int8', 'fp4'"):
        wrong: Any = "int4"
        eqquant.training.quantized_state(optax.adam(1e-2), wrong)
