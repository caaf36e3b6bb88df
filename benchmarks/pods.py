"""Language models over pods of TPUs: compiled ahead of time, for TPUs that are not here.

    python benchmarks/pods.py                        # Every case: an hour.
    python benchmarks/pods.py 8b-decode-v5e          # Those whose name has this in it.
    python benchmarks/pods.py 405b --layers 2        # Fewer layers: the same program.
    python benchmarks/pods.py 70b --weights bfloat16

The weights of the models are abstract: nothing is downloaded, and none is in memory.
Prints for each case what the compiler says: bytes on each device, and whether they fit;
what moves between devices; the kernels; and how long it took to compile.

Needs libtpu, on Linux: `pip install libtpu`.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _programs import Program
from eqquant.debug._inspect import decoded_on_devices
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh


sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples" / "llama"))
from config import Config, Llama3Scaling
from layout import AXES, Layout
from model import Decoder, empty_cache


GIB = 2**30
# Of Llama 3.1: size, hidden, layers, heads.
MODELS = {
    "8b": (4096, 14336, 32, 32),
    "70b": (8192, 28672, 80, 64),
    "405b": (16384, 53248, 126, 128),
}
# What a program may use of the memory of a device, as the compiler has it.
MEMORY = {"v5e": 15.75, "v6e": 31.25, "v5p": 95.74, "TPU7x": 94.75}


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    task: str  # "prefill", "decode" or "train".
    topology: str
    mesh: tuple[int, int, int]
    batch: int
    length: int  # Of a sequence; of the cache.

    @property
    def name(self) -> str:
        return f"{self.model}-{self.task}-{self.topology}"

    @property
    def chip(self) -> str:
        return self.topology.split(":")[0]


CASES = [
    *(
        Case("8b", task, f"{chip}:2x4", (1, 8, 1), batch, length)
        for chip in ("v5e", "v6e")
        for task, batch, length in (("prefill", 4, 2048), ("decode", 32, 4096))
    ),
    Case("70b", "decode", "v5e:4x4", (1, 8, 2), 32, 4096),
    Case("70b", "decode", "v6e:4x4", (1, 8, 2), 32, 4096),
    Case("70b", "decode", "v5p:2x2x2", (1, 8, 1), 32, 4096),
    Case("405b", "decode", "v6e:16x16", (8, 8, 4), 128, 4096),
    Case("405b", "train", "v5p:8x8x8", (64, 8, 1), 64, 4096),
    Case("405b", "train", "TPU7x:8x8x4", (64, 8, 1), 64, 4096),
]


def abstract_model(case: Case, options) -> Decoder:
    """Its shapes alone, quantized or not."""
    size, hidden, layers, heads = MODELS[case.model]
    config = Config(
        vocabulary=options.vocabulary,
        size=size,
        hidden=hidden,
        layers=options.layers or layers,
        heads=heads,
        kv_heads=8,
        head_size=128,
        rope_theta=500_000.0,
        rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192),
    )

    def make():
        model = Decoder(config, jnp.bfloat16, key=jax.random.key(0))
        if options.weights != "bfloat16":
            model = eqquant.quantize_tree(model, options.weights, progress=False)
        if case.task == "train":
            rules = {"head.*": None, "embedding.*": None}
            model = eqquant.lora_tree(
                model, options.rank, key=jax.random.key(1), rules=rules
            )
        return model

    return eqx.filter_eval_shape(make)


def program_of(case: Case, layout: Layout, model: Decoder):
    """A function, its arguments, and which of them are used up."""
    shape = case.batch, 1 if case.task == "decode" else case.length
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.tokens())
    if case.task == "train":
        return training(layout, model, tokens)
    cache = eqx.filter_eval_shape(
        empty_cache, model, case.batch, case.length, jnp.bfloat16
    )
    cache = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.cache()), cache
    )

    def extend(cache, model, tokens, start):
        hidden, cache = model.extend(tokens, cache, start, layout=layout)
        return cache, model.logits(hidden[:, -1:])

    return extend, (cache, model, tokens, jax.ShapeDtypeStruct((), jnp.int32))


def training(layout: Layout, model: Decoder, tokens):
    """A step of QLoRA: the state is that of AdamW, and adapters are what is trained."""
    trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))
    optimiser = optax.adamw(1e-4)
    state = jax.eval_shape(optimiser.init, trainable)
    moments = jax.tree.structure(trainable)
    # Moments are where the adapters are.
    place = lambda x: jax.tree.map(
        lambda x, p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p.sharding),
        x,
        trainable,
    )
    is_moment = lambda x: jax.tree.structure(x) == moments
    state = jax.tree.map(
        lambda x: place(x) if is_moment(x) else x, state, is_leaf=is_moment
    )

    def step(trained, frozen, tokens):
        trainable, state = trained

        def loss(trainable):
            model = eqx.combine(trainable, frozen)
            logits = model(tokens, remat=True, layout=layout)[:, :-1]
            total = jax.nn.logsumexp(logits, -1)
            words = jnp.arange(logits.shape[-1])
            chosen = jnp.where(words == tokens[:, 1:, None], logits, 0).sum(-1)
            return jnp.mean(total - chosen)

        value, gradients = eqx.filter_value_and_grad(loss)(trainable)
        updates, state = optimiser.update(gradients, state, trainable)
        return (eqx.apply_updates(trainable, updates), state), value

    return step, ((trainable, state), frozen, tokens)


def compiled(fn, args: tuple, layout: Layout):
    """Its first argument is donated."""
    dynamic, static = eqx.partition(args, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def call(first, rest):
        out = fn(*eqx.combine((first, *rest), static))
        return eqx.filter(out, eqx.is_array)

    first, *rest = dynamic
    times = [time.perf_counter()]
    spent = [time.process_time()]

    def lap(what):
        times.append(time.perf_counter())
        spent.append(time.process_time())
        print(
            f"  {what}: {times[-1] - times[-2]:.0f} s, "
            f"{spent[-1] - spent[-2]:.0f} s of CPU",
            flush=True,
        )

    step = jax.jit(call, donate_argnums=0, keep_unused=True)
    with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):
        traced = step.trace(first, tuple(rest))
        lap("trace")
        lowered = traced.lower(lowering_platforms=("tpu",))
        lap("lower")
        program = lowered.compile()
        lap("compile")
    return program, times[-1] - times[0], spent[-1] - spent[0]


def measure(case: Case, options) -> dict:
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=case.topology
    )
    devices = mesh_utils.create_device_mesh(
        case.mesh, topology.devices, allow_split_physical_axes=True
    )
    mesh = Mesh(devices, AXES)
    layout = Layout(mesh, *[case.task == "train"] * 2)
    model = abstract_model(case, options)
    model = eqquant.shard_tree(model, mesh, rules=layout.rules(), batch="data")
    fn, args = program_of(case, layout, model)
    program, seconds, cpu = compiled(fn, args, layout)
    text = program.as_text()
    if options.text:
        options.text.mkdir(parents=True, exist_ok=True)
        name = f"{case.name}-{options.weights}-{options.layers}.txt".replace(":", "_")
        (options.text / name).write_text(text)
    memory = program.memory_analysis()
    decoded = decoded_on_devices(text, args)
    found = Program(text)
    count, moved = found.collectives()
    return dict(
        name=case.name,
        weights=options.weights,
        layers=model.config.layers,
        arguments=memory.argument_size_in_bytes / GIB,
        temporaries=memory.temp_size_in_bytes / GIB,
        results=(memory.output_size_in_bytes - memory.alias_size_in_bytes) / GIB,
        decoded=decoded,
        kernels=dict(found.kernels()),
        collectives=dict(count),
        moved={f"{kind} {dtype}": size for (kind, dtype), size in moved.items()},
        seconds=seconds,
        cpu=cpu,
    )


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="parts of names; by default all")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--weights", default="nf4", help="a format, or bfloat16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--text", type=pathlib.Path, help="a folder for the programs")
    return parser.parse_args()


def main():
    options = parse()
    for name, value in {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(name, value)
    for case in CASES:
        if options.cases and not any(part in case.name for part in options.cases):
            continue
        print(case.name, options.weights, flush=True)
        try:
            print(json.dumps(measure(case, options)), flush=True)
        except jax.errors.JaxRuntimeError as error:
            print("  refused:", str(error)[:1500], flush=True)


if __name__ == "__main__":
    main()
