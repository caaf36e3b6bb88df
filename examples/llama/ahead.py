"""Models of Llama's sizes, compiled ahead of time for TPUs that are not present.

The weights are `jax.ShapeDtypeStruct`s, so that a small machine without a TPU suffices.
This needs libtpu, on Linux: `pip install libtpu`.
"""

import math
import os
import re
from collections.abc import Callable
from typing import Any

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from config import Config, Llama3Scaling
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh
from layout import AXES, Layout
from model import Decoder, empty_cache


GIB = 2**30
# Llama 3.1: size, hidden, layers, heads.
MODELS = {
    "8b": (4096, 14336, 32, 32),
    "70b": (8192, 28672, 80, 64),
    "405b": (16384, 53248, 126, 128),
}
# Usable GiB per device, from the error message for a program that is too large.
MEMORY = {"v5e": 15.75, "v6e": 31.24, "v5p": 95.73, "TPU7x": 94.74}
# Otherwise libtpu tries to contact the TPU's host.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def config_of(name: str, layers: int | None = None, vocabulary: int = 128_256):
    size, hidden, all_layers, heads = MODELS[name]
    return Config(
        vocabulary=vocabulary,
        size=size,
        hidden=hidden,
        layers=layers or all_layers,
        heads=heads,
        kv_heads=8,
        head_size=128,
        rope_theta=500_000.0,
        rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192),
    )


def parameters_of(config: Config) -> int:
    model = eqx.filter_eval_shape(Decoder, config, key=jax.random.key(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(model) if _is_abstract(x))


def mesh_of(topology: str, shape: tuple[int, int, int]) -> Mesh:
    """Return a mesh with the axes `AXES` over a topology such as `"v5e:4x4"`."""
    for name, value in _LIBTPU.items():
        os.environ.setdefault(name, value)
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    devices = mesh_utils.create_device_mesh(
        shape, found.devices, allow_split_physical_axes=True
    )
    return Mesh(devices, AXES)


def abstract_model(
    config: Config, layout: Layout, format: str | None, rank: int | None = None
) -> Decoder:
    """Return the shapes and shardings of a model.

    It is in bfloat16 if `format` is None, and has adapters if `rank` is given.
    """

    def make():
        model = Decoder(config, jnp.bfloat16, key=jax.random.key(0))
        if format is not None:
            model = eqquant.quantize_tree(model, format, progress=False)
        if rank is not None:
            rules = {"head.*": None, "embedding.*": None}
            key = jax.random.key(1)
            model = eqquant.lora_tree(model, rank, key=key, rules=rules)
        return model

    model = eqx.filter_eval_shape(make)
    how = {"rules": layout.rules(), "batch": "data", "scatter": layout.scatter}
    return eqquant.shard_tree(model, layout.mesh, **how)


def serving(model: Decoder, layout: Layout, batch: int, length: int, new: int = 1):
    """Return a decode function and its arguments. The function donates the first.

    It appends tokens to each sequence, with a cache for `length` tokens.
    """
    cores = getattr(layout.mesh.devices.flat[0], "num_cores", 1)
    # On chips with two cores, XLA would write attention scores to HBM.
    reads = "kernel" if cores > 1 else "slices"
    sizes = batch, length, jnp.bfloat16, reads
    cache = eqx.filter_eval_shape(empty_cache, model, *sizes)
    cache = _placed(cache, layout.cache())
    tokens = _tokens(layout, batch, new)

    @eqquant.quaxify  # Kernels read layers in the stack.
    def extend(cache, model, tokens, start):
        hidden, cache = model.extend(tokens, cache, start, layout=layout)
        return cache, model.logits(hidden[:, -1:])

    return extend, (cache, model, tokens, jax.ShapeDtypeStruct((), jnp.int32))


def training(model: Decoder, layout: Layout, batch: int, length: int):
    """Return a training step and its arguments. The function donates the first.

    AdamW trains the floating-point arrays of a model with adapters.
    """
    trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))
    optimiser = optax.adamw(1e-4)
    structure = jax.tree.structure(trainable)
    is_moments = lambda x: jax.tree.structure(x) == structure

    def place(x):  # The moments have the shardings of the adapters.
        if not is_moments(x):
            return x
        return jax.tree.map(lambda x, like: _placed(x, like.sharding), x, trainable)

    state = jax.eval_shape(optimiser.init, trainable)
    state = jax.tree.map(place, state, is_leaf=is_moments)

    def step(trained, frozen, tokens):
        trainable, state = trained

        def loss(trainable):
            model = eqx.combine(trainable, frozen)
            logits = model(tokens, remat=True, layout=layout)[:, :-1]
            words = jnp.arange(logits.shape[-1])
            chosen = jnp.where(words == tokens[:, 1:, None], logits, 0).sum(-1)
            return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)

        value, gradients = eqx.filter_value_and_grad(loss)(trainable)
        updates, state = optimiser.update(gradients, state, trainable)
        return (eqx.apply_updates(trainable, updates), state), value

    return step, ((trainable, state), frozen, _tokens(layout, batch, length))


def compile_ahead(
    fn: Callable, args: tuple, layout: Layout, tell: Callable = lambda step: None, **how
) -> jax.stages.Compiled:
    """Compile a function for the devices of the mesh.

    `tell` is called after each stage. Other keywords are options of the compiler.
    """
    (first, *rest), static = eqx.partition(args, _is_abstract)

    def call(first, rest):
        return eqx.filter(fn(*eqx.combine((first, *rest), static)), eqx.is_array)

    jitted = jax.jit(call, donate_argnums=0, keep_unused=True)
    with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):
        traced = jitted.trace(first, rest)
        tell("trace")
        lowered = traced.lower(lowering_platforms=("tpu",))
        tell("lower")
        program = lowered.compile(compiler_options=how)
        tell("compile")
    return program


def needed(error: Exception) -> float:
    """Return the GiB that a rejected program needs. Raise all other errors again."""
    found = re.search(r"([\d.]+)G\)? (?:of|exceeds)", str(error))
    if found is None:
        raise error
    return float(found[1])


def bytes_of(tree: Any) -> int:
    """Return the bytes of a tree on each device."""
    leaves = [x for x in jax.tree.leaves(tree) if _is_abstract(x) and x.sharding]
    sizes = (math.prod(x.sharding.shard_shape(x.shape)) for x in leaves)
    return sum(size * x.dtype.itemsize for size, x in zip(sizes, leaves, strict=True))


def _is_abstract(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _placed(tree, sharding):
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(place, tree)


def _tokens(layout: Layout, batch: int, length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=layout.tokens())
