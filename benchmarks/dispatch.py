"""Measure the overhead of `quaxify` in tracing, compiling and running.

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
from _tables import add_output_options, output, print_table
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
    """A small network in which each layer compiles to a separate program."""

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
    """Return the seconds of each stage in `STAGES`.

    "compile (CPU)" sums the CPU time of all cores, which other work on the machine
    affects less. "eager" is a first call without `jit`.
    """
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


def convolutions(layers: int, size: int, repeat: int, markdown: bool) -> None:
    model = Convolutions(layers, size, key=jax.random.key(0))
    x = jnp.ones((3, 16, 16))
    models = {"dense": model}
    for format in ("int8", "nf4", "ternary", "binary"):
        models[format] = eqquant.quantize_tree(model, format)
    # Alternate between models, because the load of the machine varies.
    times = {name: [] for name in models}
    for _ in range(repeat):
        for name, model in models.items():
            times[name].append(stages(model, x))
    print(
        f"\n{layers} convolutions of {size} channels, seconds (minimum of {repeat}):\n"
    )
    table = [["weights", *STAGES]]
    for name, rows in times.items():
        best = [min(column) for column in zip(*rows, strict=True)]
        table.append([name, *(f"{seconds:.3f}" for seconds in best)])
    print_table(table, markdown)


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
    add_output_options(parser)
    options = parser.parse_args()
    with output(options):
        print(machine())
        if options.only != "convolutions":
            transformer(options)
        if options.only != "transformer":
            convolutions(8, 16, min(options.repeat, 3), options.markdown)


def transformer(options) -> None:
    model = Transformer(options.layers, options.size, key=jax.random.key(0))
    quantized = eqquant.quantize_tree(model, "int8")
    x = jnp.ones((16, options.size))
    print(f"\nA transformer with {options.layers} layers of size {options.size}:\n")

    def run(model):
        dynamic, static = eqx.partition(model, eqx.is_array)
        return lambda d, x: eqx.combine(d, static)(x), dynamic

    plain, floats = run(model)
    operators, arrays = run(quantized)

    def dispatched(d, x):
        return eqquant.quaxify(operators, on_materialise="error")(d, x)

    table = [["tracing", "ms", "vs float"]]
    baseline = statistics.median(trace_seconds(plain, floats, x, repeat=options.repeat))
    for name, fn, arguments in (
        ("float", plain, floats),
        ("quantized, operators", operators, arrays),
        ("quantized, quaxify", dispatched, arrays),
    ):
        seconds = statistics.median(
            trace_seconds(fn, arguments, x, repeat=options.repeat)
        )
        table.append([name, f"{1e3 * seconds:.0f}", f"{seconds / baseline:.2f}"])
    print_table(table, options.markdown)

    compiled = {
        name: jax.jit(fn).lower(arrays, x).compile()
        for name, fn in (("operators", operators), ("quaxify", dispatched))
    }
    times = interleaved(
        {name: lambda fn=fn: fn(arrays, x) for name, fn in compiled.items()}
    )
    ratio = median(times["quaxify"]) / median(times["operators"])
    flops = [fn.cost_analysis()["flops"] for fn in compiled.values()]
    print(f"\nRun time under jit, quaxify over operators: {ratio:.2f}\n")
    print(f"FLOPs, quaxify over operators: {flops[1] / flops[0]:.4f}")


if __name__ == "__main__":
    main()
