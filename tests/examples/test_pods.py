"""examples/llama/layout.py and ahead.py.

On a mesh, the model gives the same results. Compiled for a pod, it has kernels, one
cache, and no floating-point weight.
"""

import pathlib
import re
import sys

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import kernels_in, load_benchmark, needs_compiler, relative
from jax.sharding import AxisType


decoded_on_devices = load_benchmark("_decoded_on_devices").decoded_on_devices
Program = load_benchmark("_programs").Program
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES / "llama"))

import ahead  # noqa: E402
from config import Config  # noqa: E402
from layout import AXES, Layout  # noqa: E402
from model import Decoder, empty_cache  # noqa: E402


@pytest.mark.slow
def test_model_on_a_mesh_gives_the_same_results():
    config = Config(
        vocabulary=64, size=128, hidden=256, layers=2, heads=8, kv_heads=2, head_size=16
    )
    model = Decoder(config, key=jax.random.key(0))
    model = eqquant.quantize_tree(model, eqquant.NF4(block_size=32), progress=False)
    tokens = jax.random.randint(jax.random.key(1), (4, 8), 0, 64)
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)

    @eqx.filter_jit
    def run(model, tokens, cache, layout):
        """Return a loss, and the logits of two pieces with a cache."""
        loss = lambda model: jnp.sum(model(tokens, remat=True, layout=layout) ** 2)
        scales = jax.grad(
            lambda s: loss(eqx.tree_at(lambda m: m.norm.weight, model, s))
        )
        start, hidden = 0, []
        for piece in jnp.split(tokens, [7], 1):
            some, cache = model.extend(piece, cache, start, layout=layout)
            start, hidden = start + piece.shape[1], [*hidden, some]
        hidden = jnp.concatenate(hidden, 1)
        return scales(model.norm.weight), model.logits(hidden)

    expected = run(model, tokens, empty_cache(model, 4, 8), None)
    for layout in (Layout(mesh), Layout(mesh, fsdp=True, by_tokens=True)):
        split = eqquant.shard_tree(model, mesh, rules=layout.rules(), batch="data")
        cache = jax.device_put(empty_cache(model, 4, 8), layout.cache())
        found = run(split, jax.device_put(tokens, layout.tokens()), cache, layout)
        # Activations are rounded to 15 bits relative to the largest value on each
        # device.
        for a, b in zip(found, expected, strict=True):
            assert relative(a, b) < 2e-3


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, attention, ratio",
    [("v5e:2x4", [], 1.05), ("v5p:2x2x2", ["attend_to_cache"], 1.1)],
)
def test_decode_step_compiles_for_a_pod(topology, attention, ratio):
    layout = Layout(ahead.mesh_of(topology, (1, 8, 1)))
    config = ahead.config_of("8b", layers=2, vocabulary=8192)
    model = ahead.abstract_model(config, layout, "nf4")
    fn, args = ahead.serving(model, layout, batch=32, length=4096)
    program = ahead.compile_ahead(fn, args, layout)
    assert sorted(kernels_in(program)) == [*attention, *["nf4_decode"] * 8]
    text = program.as_text()
    assert decoded_on_devices(text, args) == []
    # XLA joins slices that it moved to VMEM. A layer does not move the whole stack.
    assert not re.search(r"u8\[2,\S+ custom-call\(.*ConcatBitcast", text)
    # A step reads the cache and the codes and scales of the weights once. On v5p, XLA
    # keeps activations in HBM.
    _, model, *_ = args
    read = eqx.tree_at(lambda m: m.embedding, model, None)
    needed = ahead.bytes_of((args[0], read))
    assert needed < sum(Program(text).memory_traffic().values()) < ratio * needed
    # There is only one copy of the cache.
    cache = ahead.bytes_of(args[0])
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == cache
    assert memory.temp_size_in_bytes < cache / 8


PROGRAM = """\
%sliced (p.0: f32[4,1024], p.1: s32[]) -> f32[1024] {
  %p.0 = f32[4,1024]{1,0:T(8,128)} parameter(0)
  %p.1 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %row = f32[1,1024]{1,0:T(1,128)} dynamic-slice(%p.0, %p.1, %zero), dynamic_slice_sizes={1,1024}
  ROOT %flat = f32[1024]{0:T(1024)S(1)} bitcast(%row)
}
%less (p.2: s32[]) -> pred[] {
  %p.2 = s32[]{:T(128)} parameter(0)
  %four = s32[]{:T(128)} constant(4)
  ROOT %lt = pred[]{:T(512)} compare(%p.2, %four), direction=LT
}
%body (p.3: s32[]) -> s32[] {
  %p.3 = s32[]{:T(128)} parameter(0)
  %stack = u8[4,32,128]{2,1,0:T(32,128)(4,1)} constant({...})
  %x = bf16[1,8,128]{2,1,0:T(8,128)(2,1)S(1)} constant({...})
  %place = s32[1]{0:T(128)} bitcast(%p.3)
  ROOT %nf4_decode = f32[1,8,32]{2,1,0:T(8,128)S(1)} custom-call(%place, %x, %stack), custom_call_target="tpu_custom_call"
}
ENTRY %main (a: f32[4,1024], i: s32[]) -> f32[1024] {
  %a = f32[4,1024]{1,0:T(8,128)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %vmem = (f32[4,1024]{1,0:T(8,128)S(1)}, f32[4,1024]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  %done = f32[4,1024]{1,0:T(8,128)S(1)} copy-done(%vmem)
  %one = f32[1024]{0:T(1024)S(1)} fusion(%a, %i), kind=kLoop, calls=%sliced
  %loop = s32[]{:T(128)} while(%i), condition=%less, body=%body
  ROOT %out = f32[1024]{0:T(1024)} add(%one, %one)
}
"""  # noqa: E501


def test_bytes_that_move():
    moved = Program(PROGRAM).memory_traffic()
    # A copy reads HBM once, because it writes to VMEM. A fusion reads one row.
    assert moved["copy-start"] == 16384
    assert moved["fusion"] == 4096 + 4
    # A kernel reads one entry of its stack in each of four turns.
    assert moved["custom-call"] == 4 * (32 * 128 + 4)
    assert moved["add"] == 4096
