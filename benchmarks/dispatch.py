"""What `quaxify` costs: while tracing, and at run time.

python benchmarks/dispatch.py --layers 12
"""

import argparse
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
    options = parser.parse_args()

    model = Transformer(options.layers, options.size, key=jax.random.key(0))
    quantized = eqquant.quantize_tree(model, "int8")
    x = jnp.ones((16, options.size))
    print(f"{machine()}; a transformer of {options.layers} layers of {options.size}")

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
