"""A decoder-only language model in plain Equinox, without quantization code.

`Config` selects the architecture: Llama 2 and 3, Mistral, Qwen2, Qwen3, Gemma 2 and 3,
and the mixtures of experts Mixtral and Qwen3-MoE.

    model = Decoder(config, key=key)
    logits = model(tokens)  # (batch, length) -> (batch, length, vocabulary)

Text generation keeps the keys and values of earlier tokens in a cache:

    cache = empty_cache(model, batch, capacity)
    hidden, cache = model.extend(tokens, cache, start)
    logits = model.logits(hidden[:, -1:])

The layers are stacked and run under `lax.scan`, so that only one layer is compiled.
Under `eqquant.quaxify`, products read quantized weights of a layer in the stack.
`Mixed` (mixed.py) stacks weights that a file stores in different formats, `join`
(joined.py) joins weights with the same input, and `unstack` separates layers.
"""

import functools as ft
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from attention import attend, attend_in_pieces, softcap
from cache import Cache, View
from config import Config, rope_frequencies
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from joined import Joined, project, project_all
from layout import Layout
from mixed import is_mixed, layer_at, Linear


# One cache; or one for each layer, or for each kind of layer of a stack.
Caches = Cache | tuple[Cache, ...]
# The index of a layer in a stack; with caches by kind, its kind and index in the kind.
Place = Int[Array, ""] | tuple[Int[Array, ""], Int[Array, ""]]

#
# Layers
#


class RMSNorm(eqx.Module):
    weight: Float[Array, " size"]
    eps: float = eqx.field(static=True)
    offset: float = eqx.field(static=True)

    def __init__(self, size: int, config: Config, dtype):
        self.weight = jnp.full(size, 1 - config.norm_offset, dtype)
        self.eps = config.norm_eps
        self.offset = config.norm_offset

    def __call__(self, x: Float[Array, "*lead size"]) -> Float[Array, "*lead size"]:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return (y * (self.weight + self.offset)).astype(x.dtype)


class Attention(eqx.Module):
    query: Linear | Joined  # `join` may also have put key and value here.
    key: Linear | Joined | None
    value: Linear | None
    output: Linear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, dtype, *, key: PRNGKeyArray):
        a, b, c, d = jax.random.split(key, 4)
        linear = ft.partial(eqx.nn.Linear, dtype=dtype)
        wide, narrow = (n * config.head_size for n in (config.heads, config.kv_heads))
        bias = config.query_key_value_bias
        self.query = linear(config.size, wide, use_bias=bias, key=a)
        self.key = linear(config.size, narrow, use_bias=bias, key=b)
        self.value = linear(config.size, narrow, use_bias=bias, key=c)
        self.output = linear(wide, config.size, use_bias=config.output_bias, key=d)
        norm = lambda: RMSNorm(config.head_size, config, dtype)
        self.query_norm = norm() if config.query_key_norm else None
        self.key_norm = norm() if config.query_key_norm else None
        self.config = config

    def __call__(
        self,
        x: Float[Array, "batch length size"],
        view: View,
        cache: Caches | None,
        layer: Place | None,
        start: Int[Array, ""] | int,
        layout: Layout | None,
    ) -> tuple[Float[Array, "batch length size"], Caches | None]:
        batch, length, _ = x.shape

        def heads_of(y):
            return y.reshape(batch, length, -1, self.config.head_size).swapaxes(1, 2)

        q, k, v = map(heads_of, project_all([self.query, self.key, self.value], x))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        inner = self._attend if layout is None else layout.attention(self._attend)
        y, cache = inner(q, k, v, view, cache, layer, start)
        y = y.swapaxes(1, 2).reshape(batch, length, -1)
        return project(self.output, y), cache

    def _attend(self, q, k, v, view, cache, layer, start):
        """Compute attention for queries `(batch, heads, length, size)` of some
        heads."""
        if isinstance(cache, tuple):
            kind, index = layer

            def run(y, cache):
                del y
                return self._attend(q, k, v, view, cache, index, start)

            y, caches = jnp.zeros_like(q), []
            for i, part in enumerate(cache):
                y, part = lax.cond(kind == i, run, lambda *same: same, y, part)
                caches.append(part)
            return y, tuple(caches)
        config = self.config
        q, k = view.rotate(q), view.rotate(k)
        k, v = (x.reshape(-1, x.shape[2], config.head_size) for x in (k, v))
        k = k.swapaxes(1, 2)
        q = q * (config.attention_scale or 1 / math.sqrt(config.head_size))
        one = q.shape[2] == 1
        if cache is not None:
            cache, k, v = cache.append(k, v, layer, start)
        # Training would keep the residuals of a loop for the backward pass.
        cap, in_turns = config.attention_softcap, cache is not None
        if cache is not None and cache.reads in _readers and one and layer is not None:
            read, stacks = _readers[cache.reads], (cache.keys, cache.values)
            return read(q, *stacks, layer, view.mask, cap, start), cache
        return attend(q, k, v, view.mask, cap, in_turns), cache


def _attend_by_kernel(*args):
    # Importing Pallas takes a tenth of a second.
    from attention_kernel import attend_by_kernel

    return attend_by_kernel(*args)


_readers = {"pieces": attend_in_pieces, "kernel": _attend_by_kernel}
_activations = {"silu": jax.nn.silu, "gelu": ft.partial(jax.nn.gelu, approximate=True)}


class MLP(eqx.Module):
    """SwiGLU, or GeGLU."""

    gate: Linear | Joined  # `join` may also have put `up` here.
    up: Linear | None
    down: Linear
    activation: str = eqx.field(static=True)

    def __init__(self, config: Config, dtype, *, key: PRNGKeyArray):
        a, b, c = jax.random.split(key, 3)
        linear = ft.partial(eqx.nn.Linear, use_bias=False, dtype=dtype)
        self.gate = linear(config.size, config.hidden, key=a)
        self.up = linear(config.size, config.hidden, key=b)
        self.down = linear(config.hidden, config.size, key=c)
        self.activation = config.activation

    def __call__(
        self, x: Float[Array, "batch length size"]
    ) -> Float[Array, "batch length size"]:
        gate, up = project_all([self.gate, self.up], x)
        return project(self.down, _activations[self.activation](gate) * up)


class Experts(eqx.Module):
    """A mixture of experts: each token uses a few MLPs."""

    router: eqx.nn.Linear
    mlp: MLP  # All experts, stacked.
    active: int = eqx.field(static=True)
    normalise: bool = eqx.field(static=True)

    def __init__(self, config: Config, dtype, *, key: PRNGKeyArray):
        a, b = jax.random.split(key)
        self.router = eqx.nn.Linear(
            config.size, config.experts, use_bias=False, dtype=dtype, key=a
        )
        make = lambda key: MLP(config, dtype, key=key)
        self.mlp = eqx.filter_vmap(make)(jax.random.split(b, config.experts))
        self.active = config.active_experts
        self.normalise = config.normalise_experts

    def __call__(
        self, x: Float[Array, "batch length size"]
    ) -> Float[Array, "batch length size"]:
        scores = jax.nn.softmax(project(self.router, x).astype(jnp.float32))
        weights, chosen = lax.top_k(scores, self.active)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdims=True)
        # One row for each token and expert, sorted by expert.
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=scores.shape[-1])
        token = order // self.active

        def product(linear, y):
            return lax.ragged_dot(y, linear.weight.swapaxes(1, 2), sizes)

        y = x.reshape(-1, x.shape[-1])[token]
        gate = _activations[self.mlp.activation](product(self.mlp.gate, y))
        y = product(self.mlp.down, gate * product(self.mlp.up, y))
        y = y * weights.reshape(-1)[order][:, None].astype(y.dtype)
        return (
            jnp.zeros((x.size // x.shape[-1], x.shape[-1]), x.dtype)
            .at[token]
            .add(y)
            .reshape(x.shape)
        )


class Layer(eqx.Module):
    attention_norm: RMSNorm
    attention: Attention
    attention_post_norm: RMSNorm | None
    mlp_norm: RMSNorm
    mlp: MLP | Experts
    mlp_post_norm: RMSNorm | None

    def __init__(self, config: Config, dtype, *, key: PRNGKeyArray):
        a, b = jax.random.split(key)
        norm = lambda: RMSNorm(config.size, config, dtype)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_post_norm = norm() if config.post_norms else None
        self.attention = Attention(config, dtype, key=a)
        self.mlp = (Experts if config.experts else MLP)(config, dtype, key=b)

    def __call__(self, x, view, cache, layer, start, layout):
        same = lambda x: x
        enter = same if layout is None else layout.within_layer
        leave = same if layout is None else layout.between_layers
        y = enter(self.attention_norm(x))
        y, cache = self.attention(y, view, cache, layer, start, layout)
        y = leave(y)
        x = x + (y if self.attention_post_norm is None else self.attention_post_norm(y))
        if layout is not None and cache is not None:
            # XLA for TPU may otherwise repeat the addition in each use of the sum.
            x = lax.optimization_barrier(x)
        y = leave(self.mlp(enter(self.mlp_norm(x))))
        x = x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y))
        return x, cache


#
# The model
#


class Decoder(eqx.Module):
    embedding: eqx.nn.Embedding
    layers: Layer | tuple[Layer, ...]  # One stack, or a tuple of layers.
    norm: RMSNorm
    head: eqx.nn.Linear | None  # Absent if the head is the embedding.
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, dtype=jnp.float32, *, key: PRNGKeyArray):
        a, b, c = jax.random.split(key, 3)
        words = 0.02 * jax.random.normal(a, (config.vocabulary, config.size), dtype)
        self.embedding = eqx.nn.Embedding(weight=words)
        make = lambda key: Layer(config, dtype, key=key)
        self.layers = eqx.filter_vmap(make)(jax.random.split(b, config.layers))
        self.norm = RMSNorm(config.size, config, dtype)
        self.head = None
        if not config.tied:
            self.head = eqx.nn.Linear(
                config.size, config.vocabulary, use_bias=False, dtype=dtype, key=c
            )
        self.config = config

    def __call__(
        self,
        tokens: Int[Array, "batch length"],
        segments: Int[Array, "batch length"] | None = None,
        *,
        remat: bool = False,
        layout: Layout | None = None,
    ) -> Float[Array, "batch length vocabulary"]:
        """Return the logits of the next token at each position.

        Attention is causal, and within a segment if `segments` separates packed texts.
        With `remat`, the backward pass recomputes each layer from its input. `layout`
        shards the activations over a mesh.
        """
        same = None
        if segments is not None:
            same = segments[:, :, None] == segments[:, None, :]
        views = self._views(tokens.shape[1], tokens.shape[1], 0, same)
        hidden, _ = self._run(tokens, views, None, 0, remat, layout)
        return self.logits(hidden)

    def extend(
        self,
        tokens: Int[Array, "batch length"],
        cache: Caches,
        start: Int[Array, ""] | int,
        *,
        layout: Layout | None = None,
    ) -> tuple[Float[Array, "batch length size"], Caches]:
        """Append tokens at positions `start`, `start + 1`, ...

        Returns the input of `logits`, and the new cache. The cache must have room for
        the tokens.
        """
        caches = cache if isinstance(cache, tuple) else (cache,)
        capacity = caches[0].keys.shape[-1]
        views = self._views(tokens.shape[1], capacity, start, None)
        return self._run(tokens, views, cache, start, False, layout)

    def embed(self, tokens: Int[Array, "*lead"]) -> Float[Array, "*lead size"]:
        """Return the inputs of the first layer."""
        x = self.embedding.weight[tokens]
        if self.config.scale_embedding:
            x = x * jnp.asarray(math.sqrt(self.config.size), x.dtype)
        return x

    def logits(
        self, hidden: Float[Array, "batch length size"]
    ) -> Float[Array, "batch length vocabulary"]:
        weight = (self.embedding if self.head is None else self.head).weight
        logits = jax.vmap(jax.vmap(lambda x: weight @ x))(self.norm(hidden))
        return softcap(logits.astype(jnp.float32), self.config.logit_softcap)

    def _views(self, length: int, keys: int, start, same) -> View:
        """Return the views of global and of local layers, stacked."""
        config = self.config
        query, key = start + jnp.arange(length)[:, None], jnp.arange(keys)
        seen = (key <= query)[None] if same is None else (key <= query) & same
        angles = query * rope_frequencies(config)
        views = [View(jnp.cos(angles), jnp.sin(angles), seen)]
        if any(config.local):
            near = seen & (key > query - config.window)
            angles = query * rope_frequencies(config, local=True)
            views.append(View(jnp.cos(angles), jnp.sin(angles), near))
        return jax.tree.map(lambda *x: jnp.stack(x), *views)

    def _run(self, tokens, views, cache, start, remat, layout):
        config = self.config
        x = self.embed(tokens)
        x = x if layout is None else layout.between_layers(x)
        kinds = [int(is_local) for is_local in config.local] or [0] * config.layers

        def apply(layer, x, cache, index, kind):
            view = jax.tree.map(lambda x: x[kind], views)
            return layer(x, view, cache, index, start, layout)

        if isinstance(self.layers, tuple):
            apply = eqx.filter_checkpoint(apply) if remat else apply
            caches = cache if cache is not None else (None,) * config.layers
            new = []
            for layer, part, kind in zip(self.layers, caches, kinds, strict=True):
                x, part = apply(layer, x, part, None, kind)
                new.append(part)
            return x, tuple(new) if cache is not None else None

        arrays, static = eqx.partition(self.layers, eqx.is_array, is_leaf=is_mixed)

        # One token per sequence: XLA for TPU keeps a carry with two axes on the chip.
        flat = cache is not None and x.shape[1] == 1

        # The scan carries the cache, which is updated in place. As a scanned input
        # and output it would be copied.
        def step(carry, inputs):
            (x, cache), (arrays, number, index, kind) = carry, inputs
            x = x[:, None] if flat else x
            layer = eqx.combine(arrays, static, is_leaf=is_mixed)
            choose = lambda x: x.scanned(number) if is_mixed(x) else x
            layer = jax.tree.map(choose, layer, is_leaf=is_mixed)
            x, cache = apply(layer, x, cache, index, kind)
            return (x[:, 0] if flat else x, cache), None

        step = jax.checkpoint(step) if remat else step
        layers = numbers = jnp.arange(config.layers)
        if isinstance(cache, tuple):  # A layer has a place in the stack of its kind.
            places = [kinds[:i].count(kind) for i, kind in enumerate(kinds)]
            layers = jnp.array(kinds), jnp.array(places)
        inputs = arrays, numbers, layers, jnp.array(kinds)
        x = x[:, 0] if flat else x
        (x, cache), _ = lax.scan(step, (x, cache), inputs)
        return x[:, None] if flat else x, cache


def empty_cache(
    model: Decoder,
    batch: int,
    capacity: int,
    dtype=jnp.float32,
    reads: str = "slices",
) -> Caches:
    """Return an empty cache for `capacity` tokens per sequence. A stack of global and
    local layers has a cache for the global layers and one for the local layers.

    `reads` is the field of [`Cache`][]. It is for a cache that stays in floating point.
    """
    config = model.config

    def make(*layers: int) -> Cache:
        values = (*layers, batch * config.kv_heads, capacity, config.head_size)
        keys = (*values[:-2], config.head_size, capacity)
        return Cache(jnp.zeros(keys, dtype), jnp.zeros(values, dtype), reads)

    if isinstance(model.layers, tuple):
        return tuple(make() for _ in range(config.layers))
    local = sum(config.local)
    if 0 < local < config.layers:
        return make(config.layers - local), make(local)
    return make(config.layers)


def unstack(model: Decoder) -> Decoder:
    """Return the same model with a tuple of layers instead of a stack."""
    if isinstance(model.layers, tuple):
        return model
    of_layer = lambda x, i: x.of_layer(i) if is_mixed(x) else layer_at(x, i)

    def layer(i: int) -> Layer:
        return jax.tree.map(lambda x: of_layer(x, i), model.layers, is_leaf=is_mixed)

    layers = tuple(layer(i) for i in range(model.config.layers))
    return eqx.tree_at(lambda m: m.layers, model, layers)
