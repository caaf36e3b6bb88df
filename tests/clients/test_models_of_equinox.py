"""Models like those in Equinox's documentation run unchanged on quantized weights."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, exported
from jax import lax


KEY = jax.random.key(0)


class Mixer(eqx.Module):
    """An MLP-Mixer: it mixes patches, and then channels."""

    patches: eqx.nn.Conv2d
    tokens: list[eqx.nn.MLP]
    channels: list[eqx.nn.MLP]
    norms: list[eqx.nn.LayerNorm]
    up: eqx.nn.ConvTranspose2d

    def __init__(self, hidden: int = 32, places: int = 16, depth: int = 2):
        keys = iter(jax.random.split(KEY, 2 + 2 * depth))
        mlp = lambda n: eqx.nn.MLP(n, n, 64, depth=1, key=next(keys))
        self.patches = eqx.nn.Conv2d(3, hidden, 4, stride=4, key=next(keys))
        self.up = eqx.nn.ConvTranspose2d(hidden, 3, 4, stride=4, key=next(keys))
        self.tokens = [mlp(places) for _ in range(depth)]
        self.channels = [mlp(hidden) for _ in range(depth)]
        self.norms = [eqx.nn.LayerNorm((hidden, places)) for _ in range(depth)]

    def __call__(self, image):
        y = self.patches(image)
        shape = y.shape
        y = y.reshape(len(y), -1)
        for token, channel, norm in zip(
            self.tokens, self.channels, self.norms, strict=True
        ):
            y = y + jax.vmap(token)(norm(y))
            y = y + jax.vmap(channel, 1, 1)(y)
        return self.up(y.reshape(shape))


class Recurrent(eqx.Module):
    """A recurrent cell over a sequence, and a linear layer on its final state."""

    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, size: int = 8, hidden: int = 64):
        a, b = jax.random.split(KEY)
        self.cell = eqx.nn.GRUCell(size, hidden, key=a)
        self.head = eqx.nn.Linear(hidden, 8, key=b)

    def __call__(self, xs):
        start = jnp.zeros(self.cell.hidden_size)
        last, _ = lax.scan(lambda h, x: (self.cell(x, h), None), start, xs)
        return jax.nn.sigmoid(self.head(last))


class Encoder(eqx.Module):
    """A small BERT: embeddings, masked attention, and a layer on the first token."""

    words: eqx.nn.Embedding
    places: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norms: list[eqx.nn.LayerNorm]
    pooler: eqx.nn.Linear

    def __init__(self, size: int = 64):
        keys = iter(jax.random.split(KEY, 6))
        self.words = eqx.nn.Embedding(50, size, key=next(keys))
        self.places = eqx.nn.Embedding(16, size, key=next(keys))
        self.attention = eqx.nn.MultiheadAttention(4, size, key=next(keys))
        self.up = eqx.nn.Linear(size, 2 * size, key=next(keys))
        self.down = eqx.nn.Linear(2 * size, size, key=next(keys))
        self.pooler = eqx.nn.Linear(size, size, key=next(keys))
        self.norms = [eqx.nn.LayerNorm(size) for _ in range(3)]

    def __call__(self, tokens):
        first, second, third = map(jax.vmap, self.norms)
        places = jnp.arange(len(tokens))
        x = first(jax.vmap(self.words)(tokens) + jax.vmap(self.places)(places))
        mask = (tokens > 0)[None, :] & (tokens > 0)[:, None]
        x = second(x + self.attention(x, x, x, mask=mask))
        x = third(x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x))))
        return jnp.tanh(self.pooler(x[0]))


MODELS = {
    "mixer": (Mixer, lambda key: jax.random.normal(key, (3, 16, 16))),
    "recurrent": (Recurrent, lambda key: jax.random.normal(key, (6, 8))),
    "encoder": (Encoder, lambda key: jax.random.randint(key, (9,), 1, 50)),
}


@pytest.mark.slow  # `make test-clients` runs these tests.
@pytest.mark.parametrize("name", MODELS)
def test_model_runs_unchanged(name):
    make, make_input = MODELS[name]
    q = eqquant.quantize_tree(make(), "int8")
    left = [row.path for row in eqquant.report(q).rows if row.format is None]
    assert all("norms" in path or "bias" in path for path in left)
    x, dense = make_input(KEY), eqquant.dequantize_tree(q)
    run = eqx.filter_jit(lambda model, x: model(x))
    with jax.default_matmul_precision("highest"):
        expected = run(dense, x)
        assert_close(run(q, x), expected, 1e-5)
        assert_close(exported(lambda q, x: q(x), q, x), expected, 1e-5)
