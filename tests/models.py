"""Models for the tests of training."""

import equinox as eqx
import jax
import jax.numpy as jnp


KEY = jax.random.key(0)


def mlp() -> eqx.nn.MLP:
    return eqx.nn.MLP(64, 64, 64, 2, key=KEY)


class Mixed(eqx.Module):
    """A model with one layer of each kind."""

    embedding: eqx.nn.Embedding
    conv: eqx.nn.Conv1d
    stacked: eqx.nn.Linear
    cell: eqx.nn.GRUCell
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm

    def __init__(self):
        self.embedding = eqx.nn.Embedding(32, 32, key=KEY)
        self.conv = eqx.nn.Conv1d(32, 32, 3, padding=1, key=KEY)
        make = lambda key: eqx.nn.Linear(32, 32, key=key)
        self.stacked = eqx.filter_vmap(make)(jax.random.split(KEY, 3))
        self.cell = eqx.nn.GRUCell(32, 32, key=KEY)
        self.attention = eqx.nn.MultiheadAttention(2, 32, key=KEY)
        self.norm = eqx.nn.LayerNorm(32)

    def __call__(self, tokens):
        x = self.conv(jax.vmap(self.embedding)(tokens).T).T

        @eqx.filter_checkpoint
        def layer(x, linear):
            return x + jax.vmap(linear)(jax.nn.relu(x)), None

        x, _ = jax.lax.scan(layer, x, self.stacked)
        x = x + self.attention(x, x, x)
        step = lambda state, x: (self.cell(x, state), None)
        state, _ = jax.lax.scan(step, jnp.zeros(32), x)
        return self.norm(state)


TOKENS = jnp.arange(7) * 3


def scalar(model, *args):
    return jnp.sum(jnp.square(model(*args)))
