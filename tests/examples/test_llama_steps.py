"""The compiled programs of a token in examples/llama."""

import dataclasses
import json
import pathlib
import sys

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import large_copies, slow, strict


HERE = pathlib.Path(__file__).parent
DATA = HERE / "data" / "llama"
sys.path.insert(0, str(HERE.parents[1] / "examples" / "llama"))

import generate  # noqa: E402
from architectures import config_of  # noqa: E402
from config import Config  # noqa: E402
from mixed import Mixed  # noqa: E402
from model import Decoder, empty_cache, unstack  # noqa: E402
from sampling import Sampling  # noqa: E402


@pytest.mark.parametrize("kv", [None, slow("int8")])
@pytest.mark.parametrize("stacked", [False, slow(True), slow("mixed")])
@pytest.mark.parametrize("name", ["llama3", slow("gemma3"), slow("wide")])
def test_cache_is_updated_in_place(name, kv, stacked):
    """A step appends to the cache, and copies nothing. It reads a stacked float cache
    in pieces."""
    folder = DATA / ("llama3" if name == "wide" else name)
    values = json.loads((folder / "config.json").read_text())
    config = dataclasses.replace(config_of(values), layers=8)
    if name == "wide":  # A token has 512 values.
        config = dataclasses.replace(config, heads=8, kv_heads=8, head_size=64)
    if config.local:
        config = dataclasses.replace(config, local=(True, True, True, False) * 2)
    capacity = 4096

    def make(key):
        model = Decoder(config, key=key)
        if stacked == "mixed":
            down = Mixed.split(model.layers.mlp.down, (0, 1) * 4)
            model = eqx.tree_at(lambda m: m.layers.mlp.down, model, down)
        return model if stacked else unstack(model)

    model = eqx.filter_eval_shape(make, jax.random.key(0))
    reads = "pieces" if kv is None else "slices"
    cache = empty_cache(model, 1, capacity, reads=reads)
    if kv is not None:
        cache = generate.quantize_cache(cache, kv)
    is_described = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    arrays, static = eqx.partition(model, is_described)

    def step(arrays, cache, token, start):
        return eqx.combine(arrays, static).extend(token, cache, start)

    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    start = jax.ShapeDtypeStruct((), jnp.int32)
    step = jax.jit(strict(step), donate_argnums=1)
    compiled = step.lower(arrays, cache, token, start).compile()
    memory = compiled.memory_analysis()
    size = eqquant.trees.nbytes(cache)
    assert memory.alias_size_in_bytes == size
    # Several float32 scores are alive at the same time.
    scores = 4 * config.heads * capacity
    assert memory.temp_size_in_bytes < 8 * scores + 100_000 < size
    if stacked and kv is None:
        assert not large_copies(compiled.as_text())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        slow(Sampling(temperature=0.0)),
        slow(Sampling(top_k=40)),
        slow(Sampling(top_k=40, top_p=1.0)),
        slow(Sampling(top_p=1.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kv", ["int8", None])
def test_a_step_reads_layers_and_cache_in_place(kv, sampling):
    """The program of a token copies nothing of the size of a weight, of the cache or
    of the logits."""
    config = Config(
        vocabulary=2**15,
        size=256,
        layers=3,
        heads=4,
        kv_heads=2,
        head_size=64,
        hidden=1024,
        tied=True,
    )

    def make(key):
        return eqquant.quantize_tree(Decoder(config, key=key), "nf4", progress=False)

    model = eqx.filter_eval_shape(make, jax.random.key(0))
    generator = generate.Generator(model, 1024, kv, sampling)
    text = generator._program(1).as_text()
    if "eqquant_dot" not in text:
        pytest.skip("NATIVE KERNELS NOT RUN")
    weight, logits = 256 * 1024 // 2, 4 * config.vocabulary
    assert min(weight, logits) > 2**16 and not large_copies(text)
