"""Time training steps with quantized weights against float32 steps in the same run.

    python benchmarks/training.py --size 256 --seconds 30

The model is a transformer with 6 layers. Batches have 16 x 128 tokens, and the
optimizer is optax's Adam. "ratio" is the time over the time of the row in the column
"baseline".

Rows such as "stack 2048" are four `eqx.nn.Linear` of this width without a nonlinearity
between them, and 512 tokens: the forward pass and all gradients, without an optimizer.
"stack 2048, int8" computes their products in int8, in both directions.
"""

import argparse
import dataclasses
import functools as ft
import re
from collections.abc import Callable

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _tables import add_output_options, output, print_table
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
    """A model to train, made from the float model, and the row to compare it with."""

    make: Callable
    trainable: Callable = lambda model: jax.tree.map(eqx.is_inexact_array, model)
    baseline: str = "float"


def qat(format, **options) -> Row:
    return Row(lambda model: eqquant.FakeQuantized(model, format, **options))


ROWS = {
    "float": Row(lambda model: model),
    "int8": qat("int8"),
    "int8, int8 activations": qat("int8", activations="int8"),
    "int8, learned scales": qat("int8", learn_scales=True),
    "nf4": qat("nf4"),
    "ternary": qat("ternary"),
    "ternary, BitNet b1.58": qat(
        eqquant.Ternary(rule="absmean", least_squares=False), activations="int8"
    ),
    "binary": qat("binary"),
}
for name in ("int8", "fp8", "mxfp8"):
    make = ft.partial(eqquant.training.low_precision, recipe=name)
    ROWS[f"{name}, low-precision products"] = Row(make)
for format in ("int8", "nf4", "ternary", "binary"):
    ROWS[f"{format}, quantized matmuls"] = qat(format, quantized_products=True)
ROWS['int8 "default", quantized matmuls'] = qat(
    "int8", quantized_products=True, precision="default"
)


def lora(format, baseline: str) -> Row:
    def make(model):
        if format is not None:
            model = eqquant.quantize_tree(model, format)
        return eqquant.lora_tree(model, 8, key=jax.random.key(2))

    return Row(make, eqquant.trainable_mask, baseline)


ROWS |= {
    "float, LoRA": lora(None, "float"),
    "nf4, QLoRA": lora("nf4", "float, LoRA"),
    "nf4 double, QLoRA": lora(eqquant.NF4(double_quantization=True), "float, LoRA"),
}


STACKS = (512, 1024, 2048, 4096)
for width in STACKS:
    ROWS |= {
        f"stack {width}": Row(lambda model: model, baseline=f"stack {width}"),
        f"stack {width}, int8": Row(
            ft.partial(eqquant.training.low_precision, recipe="int8"),
            baseline=f"stack {width}",
        ),
    }


def make_stack(row: Row, width: int) -> Callable[[], object]:
    """Return a function that computes the gradients of four layers and of 512 tokens.
    The first call compiles."""
    *keys, last = jax.random.split(jax.random.key(0), 5)
    linear = lambda key: eqx.nn.Linear(width, width, use_bias=False, key=key)
    model = row.make(eqx.nn.Sequential([linear(key) for key in keys]))
    x = jax.random.normal(last, (512, width))
    loss = lambda both: jnp.mean(jax.vmap(both[0])(both[1]) ** 2)
    gradients = eqx.filter_jit(eqx.filter_value_and_grad(loss))
    return lambda: gradients((model, x))


def make_step(row: Row, size: int) -> Callable[[], object]:
    """Return a function that repeats one training step. The first call compiles."""
    model = row.make(Transformer(size, key=jax.random.key(0)))
    trainable, frozen = eqx.partition(model, row.trainable(model))
    optimizer = optax.adam(1e-3)
    state = optimizer.init(trainable)
    a, b = jax.random.split(jax.random.key(1))
    x = jax.random.normal(a, (BATCH, TOKENS, size))
    y = jax.random.normal(b, (BATCH, TOKENS, size))

    def loss(trainable, frozen):
        return jnp.mean((jax.vmap(eqx.combine(trainable, frozen))(x) - y) ** 2)

    @eqx.filter_jit
    def step(trainable, frozen, state):
        value, gradients = eqx.filter_value_and_grad(loss)(trainable, frozen)
        updates, state = optimizer.update(gradients, state)
        return value, eqx.apply_updates(trainable, updates), state

    return lambda: step(trainable, frozen, state)[:1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    add_output_options(parser)
    options = parser.parse_args()
    with output(options):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    names = [*(ROWS[name].baseline for name in options.rows), *options.rows]
    steps = {
        name: make_stack(ROWS[name], int(found[1]))
        if (found := re.match(r"stack (\d+)", name))
        else make_step(ROWS[name], options.size)
        for name in dict.fromkeys(names)
    }
    times = interleaved(steps, seconds=options.seconds)
    print(f"{machine()}; size {options.size}, batch {BATCH} x {TOKENS} tokens\n")
    table = [["model", "ms per step", "ratio", "baseline"]]
    for name, runs in times.items():
        seconds, baseline = median(runs), ROWS[name].baseline
        ratio = seconds / median(times[baseline])
        table.append([name, f"{1e3 * seconds:.1f}", f"{ratio:.2f}", baseline])
    print_table(table, options.markdown)


if __name__ == "__main__":
    main()
