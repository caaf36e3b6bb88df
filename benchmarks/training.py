"""Steps of training, against the plain step in floating point in the same run.

A transformer of 6 layers on batches of 16 x 128 tokens, with optax's Adam.

    python benchmarks/training.py --size 256 --seconds 30
"""

import argparse
import dataclasses
from collections.abc import Callable

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _timing import interleaved, machine, median


LAYERS, HEADS, BATCH, TOKENS = 6, 4, 16, 128


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norms: list[eqx.nn.LayerNorm]

    def __init__(self, size: int, *, key):
        a, b, c = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(HEADS, size, key=a)
        self.up = eqx.nn.Linear(size, 4 * size, key=b)
        self.down = eqx.nn.Linear(4 * size, size, key=c)
        self.norms = [eqx.nn.LayerNorm(size), eqx.nn.LayerNorm(size)]

    def __call__(self, x):
        y = jax.vmap(self.norms[0])(x)
        causal = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(y, y, y, causal)
        y = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(x)))
        return x + jax.vmap(self.down)(y)


class Transformer(eqx.Module):
    blocks: list[Block]

    def __init__(self, size: int, *, key):
        self.blocks = [Block(size, key=k) for k in jax.random.split(key, LAYERS)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@dataclasses.dataclass(frozen=True)
class Row:
    """What is trained: made of the float model; and to which row it is compared."""

    make: Callable
    trainable: Callable = lambda model: jax.tree.map(eqx.is_inexact_array, model)
    baseline: str = "float"


def qat(format, **options) -> Row:
    return Row(lambda model: eqquant.FakeQuantized(model, format, **options))


ROWS = {
    "float": Row(lambda model: model),
    "int8": qat("int8"),
    "int8, int8 activations": qat(eqquant.Int8(activations="int8")),
    "int8, learned scales": qat("int8", learn_scales=True),
    "nf4": qat("nf4"),
    "ternary": qat("ternary"),
    "ternary, BitNet b1.58": qat(
        eqquant.Ternary(rule="absmean", least_squares=False, activations="int8")
    ),
    "binary": qat("binary"),
}
for name, format in {
    "int8": "int8",
    'int8 "default"': eqquant.Int8(precision="default"),
    "nf4": "nf4",
    "ternary": "ternary",
    "binary": "binary",
}.items():
    ROWS[f"{name}, its products"] = qat(format, quantized_products=True)


def lora(format, baseline: str) -> Row:
    def make(model):
        if format is not None:
            model = eqquant.quantize_tree(model, format)
        return eqquant.lora_tree(model, 8, key=jax.random.key(2))

    return Row(make, eqquant.trainable_mask, baseline)


ROWS |= {
    "float, LoRA": lora(None, "float"),
    "nf4, QLoRA": lora("nf4", "float, LoRA"),
    "nf4 twice, QLoRA": lora(eqquant.NF4(double_quantization=True), "float, LoRA"),
}


def make_step(row: Row, size: int) -> Callable[[], object]:
    """One step of training: always the same one, compiled the first time."""
    model = row.make(Transformer(size, key=jax.random.key(0)))
    trainable, frozen = eqx.partition(model, row.trainable(model))
    optimiser = optax.adam(1e-3)
    state = optimiser.init(trainable)
    a, b = jax.random.split(jax.random.key(1))
    x = jax.random.normal(a, (BATCH, TOKENS, size))
    y = jax.random.normal(b, (BATCH, TOKENS, size))

    def loss(trainable, frozen):
        return jnp.mean((jax.vmap(eqx.combine(trainable, frozen))(x) - y) ** 2)

    @eqx.filter_jit
    def step(trainable, frozen, state):
        value, gradients = eqx.filter_value_and_grad(loss)(trainable, frozen)
        updates, state = optimiser.update(gradients, state)
        return value, eqx.apply_updates(trainable, updates), state

    return lambda: step(trainable, frozen, state)[:1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    options = parser.parse_args()
    names = [*(ROWS[name].baseline for name in options.rows), *options.rows]
    steps = {name: make_step(ROWS[name], options.size) for name in dict.fromkeys(names)}
    times = interleaved(steps, seconds=options.seconds)
    print(f"{machine()}; size {options.size}, batch {BATCH} x {TOKENS} tokens")
    print(f"{'':24}  ms a step   ratio  of")
    for name, all_times in times.items():
        seconds, baseline = median(all_times), ROWS[name].baseline
        ratio = seconds / median(times[baseline])
        print(f"{name:24} {1e3 * seconds:10.1f} {ratio:7.2f}  {baseline}")


if __name__ == "__main__":
    main()
