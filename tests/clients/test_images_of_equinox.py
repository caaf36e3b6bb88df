"""Image models like Equinox's examples: a U-Net, a GAN, and score-based diffusion."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from compare import check, left
from helpers import strict


KEY = jax.random.key(0)


class UNet(eqx.Module):
    """Convolutions to half of the size and back, with a connection across."""

    inner: list[eqx.nn.Conv2d]
    norm: eqx.nn.GroupNorm
    down: eqx.nn.Conv2d
    up: eqx.nn.ConvTranspose2d
    time: eqx.nn.MLP

    def __init__(self, channels: int = 16):
        keys = iter(jax.random.split(KEY, 6))
        conv = lambda a, b, **options: eqx.nn.Conv2d(
            a, b, 3, padding=1, key=next(keys), **options
        )
        wide = 2 * channels
        self.inner = [conv(3, channels), conv(wide, wide), conv(wide, 3)]
        self.norm = eqx.nn.GroupNorm(4, wide)
        self.down = conv(channels, wide, stride=2)
        self.up = eqx.nn.ConvTranspose2d(
            wide, channels, 4, 2, padding=1, key=next(keys)
        )
        self.time = eqx.nn.MLP(1, wide, 32, 1, key=next(keys))

    def __call__(self, t, image):
        across = jax.nn.silu(self.inner[0](image))
        y = self.norm(self.down(across)) + self.time(t[None])[:, None, None]
        y = self.up(jax.nn.silu(self.inner[1](jax.nn.silu(y))))
        return self.inner[2](jnp.concatenate([across, y]))


class Generator(eqx.Module):
    """Noise to an image of 16 by 16, with norms over the batch."""

    layers: list[eqx.nn.ConvTranspose2d]
    norms: list[eqx.nn.BatchNorm]

    def __init__(self, channels: int = 32):
        sizes = [(8, channels, 4, 1, 0), (channels, 16, 4, 2, 1), (16, 3, 4, 2, 1)]
        keys = jax.random.split(KEY, 3)
        layer = lambda a, b, kernel, stride, padding, key: eqx.nn.ConvTranspose2d(
            a, b, kernel, stride, padding=padding, use_bias=False, key=key
        )
        pairs = zip(sizes, keys, strict=True)
        self.layers = [layer(*size, key) for size, key in pairs]
        norm = lambda size: eqx.nn.BatchNorm(size, "batch", mode="batch")
        self.norms = [norm(channels), norm(16)]

    def __call__(self, noise, state):
        y = noise[:, None, None]
        for layer, norm in zip(self.layers, self.norms, strict=False):
            y, state = norm(layer(y), state)
            y = jax.nn.relu(y)
        return jnp.tanh(self.layers[-1](y)), state


class Discriminator(eqx.Module):
    layers: list[eqx.nn.Conv2d]
    head: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(KEY, 3)
        sizes = [(3, 16), (16, 32)]
        layer = lambda size, key: eqx.nn.Conv2d(*size, 4, 2, padding=1, key=key)
        pairs = zip(sizes, keys[:2], strict=True)
        self.layers = [layer(size, key) for size, key in pairs]
        self.head = eqx.nn.Linear(512, "scalar", key=keys[2])

    def __call__(self, image):
        for layer in self.layers:
            image = jax.nn.leaky_relu(layer(image), 0.2)
        return self.head(image.ravel())


@pytest.mark.slow  # `make test-clients` runs these tests.
def test_gan():
    """The loss of the generator, through the discriminator, and both gradients."""
    generator, state = eqx.nn.make_with_state(Generator)()
    noise = jax.random.normal(KEY, (4, 8))

    def loss(models):
        generator, discriminator = models
        over = dict(in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        images, _ = jax.vmap(generator, **over)(noise, state)
        return jnp.mean(jax.nn.softplus(-jax.vmap(discriminator)(images)))

    q = check((generator, Discriminator()), loss, least=0.9, run=strict)
    assert "1.head.weight" not in left(q)


@pytest.mark.slow
def test_score_based_diffusion():
    """The loss by denoising, and a deterministic sampler, with a U-Net."""
    images = jax.random.normal(KEY, (2, 3, 8, 8))
    noise = jax.random.normal(jax.random.key(1), images.shape)
    times = jnp.array([0.3, 0.8])

    def loss(model):
        decay = jnp.exp(-times)[:, None, None, None]
        deviation = jnp.sqrt(1 - decay**2)
        scores = jax.vmap(model)(times, images * decay + noise * deviation)
        return jnp.mean((scores * deviation + noise) ** 2)

    def sample(model):
        def step(i, y):
            t = 1 - i / 4
            return y + (y + model(t, y)) / 8

        return jax.lax.fori_loop(0, 4, step, noise[0])

    q = check(UNet(), loss, run=strict)
    # The first layer of the time embedding has 32 weights.
    weights = {path for path in left(q) if path.endswith("weight")}
    assert weights == {"norm.weight", "time.layers.0.weight"}
    check(UNet(), sample, run=strict)
