"""Sequence models like Equinox's examples: S5, and a neural controlled equation."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from compare import check, left
from helpers import strict
from jax import lax
from jaxtyping import Array, Float


KEY = jax.random.key(0)


class StateSpace(eqx.Module):
    """A diagonal linear recurrence in complex numbers, scanned in parallel."""

    decay: Float[Array, " states"]
    frequency: Float[Array, " states"]
    step: Float[Array, " states"]
    into: Float[Array, "states size 2"]  # Real and imaginary parts.
    out: Float[Array, "size states 2"]
    skip: Float[Array, " size"]

    def __init__(self, size: int, states: int, *, key):
        keys = jax.random.split(key, 4)
        self.decay = jnp.full(states, -0.5)
        self.frequency = jnp.pi * jnp.arange(states)
        self.step = jax.random.uniform(keys[0], (states,), minval=-6, maxval=-2)
        self.into = jax.random.normal(keys[1], (states, size, 2)) / size**0.5
        self.out = jax.random.normal(keys[2], (size, states, 2)) / states**0.5
        self.skip = jax.random.normal(keys[3], (size,))

    def __call__(self, xs):
        rate = self.decay + 1j * self.frequency
        change = jnp.exp(rate * jnp.exp(self.step))
        scale = ((change - 1) / rate)[:, None]
        into = scale * (self.into[..., 0] + 1j * self.into[..., 1])
        inputs = xs @ into.T
        changes = jnp.broadcast_to(change, inputs.shape)
        join = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
        _, states = lax.associative_scan(join, (changes, inputs))
        out = self.out[..., 0] + 1j * self.out[..., 1]
        return (states @ out.T).real + self.skip * xs


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    states: StateSpace
    up: eqx.nn.Linear
    gate: eqx.nn.Linear

    def __init__(self, size: int, *, key):
        keys = jax.random.split(key, 3)
        self.norm = eqx.nn.LayerNorm(size)
        self.states = StateSpace(size, size // 2, key=keys[0])
        self.up = eqx.nn.Linear(size, size, key=keys[1])
        self.gate = eqx.nn.Linear(size, size, key=keys[2])

    def __call__(self, xs):
        ys = jax.nn.gelu(self.states(jax.vmap(self.norm)(xs)))
        return xs + jax.vmap(self.up)(ys) * jax.nn.sigmoid(jax.vmap(self.gate)(ys))


class S5(eqx.Module):
    """Simplified state space layers (arXiv 2208.04933): a scan over stacked blocks."""

    encoder: eqx.nn.Linear
    blocks: Block
    head: eqx.nn.Linear

    def __init__(self, size: int = 64, depth: int = 2):
        keys = jax.random.split(KEY, 3)
        self.encoder = eqx.nn.Linear(8, size, key=keys[0])
        make = lambda key: Block(size, key=key)
        self.blocks = eqx.filter_vmap(make)(jax.random.split(keys[1], depth))
        self.head = eqx.nn.Linear(size, 10, key=keys[2])

    def __call__(self, xs):
        dynamic, static = eqx.partition(self.blocks, eqx.is_array)
        step = lambda xs, block: (eqx.combine(block, static)(xs), None)
        xs, _ = lax.scan(step, jax.vmap(self.encoder)(xs), dynamic)
        return self.head(jnp.mean(xs, 0))


class Field(eqx.Module):
    """A vector field whose values are matrices, to multiply by the controls."""

    mlp: eqx.nn.MLP

    def __call__(self, t, y, args):
        return self.mlp(y).reshape(len(y), -1)


class ControlledEquation(eqx.Module):
    """A neural controlled differential equation (arXiv 2005.08926)."""

    start: eqx.nn.MLP
    field: Field
    head: eqx.nn.Linear

    def __init__(self, controls: int = 3, size: int = 16):
        a, b, c = jax.random.split(KEY, 3)
        self.start = eqx.nn.MLP(controls, size, 64, 1, key=a)
        last = jnp.tanh
        mlp = eqx.nn.MLP(size, size * controls, 64, 1, final_activation=last, key=b)
        self.field = Field(mlp)
        self.head = eqx.nn.Linear(size, 16, key=c)

    def __call__(self, times, values):
        diffrax = pytest.importorskip("diffrax")
        coefficients = diffrax.backward_hermite_coefficients(times, values)
        control = diffrax.CubicInterpolation(times, coefficients)
        term = diffrax.ControlTerm(self.field, control).to_ode()
        y0 = self.start(control.evaluate(times[0]))
        solution = diffrax.diffeqsolve(
            term, diffrax.Heun(), times[0], times[-1], 0.25, y0, max_steps=8
        )
        return self.head(solution.ys[-1])


@pytest.mark.slow  # `make test-clients` runs these tests.
@pytest.mark.filterwarnings("ignore:.*of the bytes stay in floating point")
def test_s5():
    xs = jax.random.normal(KEY, (12, 8))
    call = lambda model: model(xs)
    q = check(S5(), call, least=0.5, run=strict)
    assert {"blocks.states.into", "blocks.states.out"} <= left(q)
    # Rules may choose the complex matrices, which are decoded to scale them.
    rules = {"*.into": ("int8", -2), "*.out": ("int8", -2)}
    chosen = eqquant.quantize_tree(S5(), "int8", rules=rules)
    with pytest.raises(eqquant.MaterialiseError):
        jax.eval_shape(strict(call), chosen)


@pytest.mark.slow
def test_a_controlled_differential_equation():
    times = jnp.linspace(0, 1, 5)
    values = jnp.stack([times, jnp.sin(3 * times), jnp.cos(3 * times)], -1)
    check(ControlledEquation(), lambda model: model(times, values), run=strict)
