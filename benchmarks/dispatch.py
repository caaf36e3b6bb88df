"""What `quaxify` costs: while tracing, at run time, and until a small convolutional
network has been compiled.

python benchmarks/dispatch.py --layers 12
python benchmarks/dispatch.py --only convolutions
"""

import argparse
import itertools
import statistics
import time

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
from _timing import interleaved, machine, median


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: list[eqx.nn.LayerNorm]

    def __init__(self, size: int, *, key):
        a, b = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(4, size, key=a)
        self.mlp = eqx.nn.MLP(size, size, 4 * size, 1, jax.nn.gelu, key=b)
        self.norms = [eqx.nn.LayerNorm(size), eqx.nn.LayerNorm(size)]

    def __call__(self, x):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Transformer(eqx.Module):
    blocks: list[Block]

    def __init__(self, layers: int, size: int, *, key):
        self.blocks = [Block(size, key=k) for k in jax.random.split(key, layers)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Convolutions(eqx.Module):
    """Mostly compile time: each layer is a program of its own, if a small one."""

    layers: list[eqx.nn.Conv2d]
    head: eqx.nn.Linear

    def __init__(self, layers: int, size: int, *, key):
        key, *keys = jax.random.split(key, layers + 1)
        sizes = [3, *[size] * layers]
        self.layers = [
            eqx.nn.Conv2d(a, b, 3, padding=1, key=k)
            for a, b, k in zip(sizes, sizes[1:], keys, strict=False)
        ]
        self.head = eqx.nn.Linear(size, 10, key=key)

    def __call__(self, x):
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return self.head(jnp.mean(x, (1, 2)))


STAGES = ("trace", "lower", "compile", "compile (CPU)", "eager")


def stages(model, x) -> list[float]:
    """Seconds of each stage; of compiling also those of all cores together, which other
    work on the machine does not change as much; and of a first call without `jit`."""
    dynamic, static = eqx.partition(model, eqx.is_array)
    jax.clear_caches()
    times = [time.perf_counter()]
    traced = jax.jit(lambda d, x: eqx.combine(d, static)(x)).trace(dynamic, x)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    cores = time.process_time()
    lowered.compile()
    cores = time.process_time() - cores
    times.append(time.perf_counter())
    jax.clear_caches()
    start = time.perf_counter()
    jax.block_until_ready(eqquant.quaxify(model)(x))
    eager = time.perf_counter() - start
    return [*(b - a for a, b in itertools.pairwise(times)), cores, eager]


def convolutions(layers: int, size: int, repeat: int) -> None:
    model = Convolutions(layers, size, key=jax.random.key(0))
    x = jnp.ones((3, 16, 16))
    models = {"dense": model}
    for format in ("int8", "nf4", "ternary", "binary"):
        models[format] = eqquant.quantize_tree(model, format)
    # In turn, as other work on the machine comes and goes.
    times = {name: [] for name in models}
    for _ in range(repeat):
        for name, model in models.items():
            times[name].append(stages(model, x))
    print(f"{layers} convolutions of {size} channels, seconds (least of {repeat})")
    print(f"{'':<12}" + "".join(f"{stage:>15}" for stage in STAGES))
    for name, rows in times.items():
        best = [min(column) for column in zip(*rows, strict=True)]
        print(f"{name:<12}" + "".join(f"{seconds:>15.3f}" for seconds in best))


def trace_seconds(fn, *args, repeat: int) -> list[float]:
    times = []
    for _ in range(repeat):
        jax.clear_caches()
        start = time.perf_counter()
        jax.make_jaxpr(lambda *args: fn(*args))(*args)
        times.append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=("transformer", "convolutions"))
    options = parser.parse_args()
    print(machine())
    if options.only != "convolutions":
        transformer(options)
    if options.only != "transformer":
        convolutions(8, 16, min(options.repeat, 3))


def transformer(options) -> None:
    model = Transformer(options.layers, options.size, key=jax.random.key(0))
    quantized = eqquant.quantize_tree(model, "int8")
    x = jnp.ones((16, options.size))
    print(f"a transformer of {options.layers} layers of {options.size}")

    def run(model):
        dynamic, static = eqx.partition(model, eqx.is_array)
        return lambda d, x: eqx.combine(d, static)(x), dynamic

    plain, floats = run(model)
    operators, arrays = run(quantized)

    def dispatched(d, x):
        return eqquant.quaxify(operators, on_materialise="error")(d, x)

    print(f"{'tracing':<34}{'ms':>8}{'of plain':>10}")
    baseline = statistics.median(trace_seconds(plain, floats, x, repeat=options.repeat))
    for name, fn, arguments in (
        ("plain, float", plain, floats),
        ("quantized, by its operators", operators, arrays),
        ("quantized, by quaxify", dispatched, arrays),
    ):
        seconds = statistics.median(
            trace_seconds(fn, arguments, x, repeat=options.repeat)
        )
        print(f"{name:<34}{1e3 * seconds:>8.0f}{seconds / baseline:>10.2f}")

    compiled = {
        name: jax.jit(fn).lower(arrays, x).compile()
        for name, fn in (("operators", operators), ("quaxify", dispatched))
    }
    times = interleaved(
        {name: lambda fn=fn: fn(arrays, x) for name, fn in compiled.items()}
    )
    ratio = median(times["quaxify"]) / median(times["operators"])
    flops = [fn.cost_analysis()["flops"] for fn in compiled.values()]
    print(f"run time under jit, quaxify over operators: {ratio:.2f}")
    print(f"operations, quaxify over operators: {flops[1] / flops[0]:.4f}")


if __name__ == "__main__":
    main()
