"""Estimate a training step of a layer of a language model with 8B weights on TPUs.

    python benchmarks/static/tpu_training.py
    python benchmarks/static/tpu_training.py --chips v6e --tokens 8192

The layer has the matrices of Llama 3 8B: 4096 x 4096 twice, 1024 x 4096 twice,
14336 x 4096 twice and 4096 x 14336, with norms, products and SiLU between them. The
product of queries with keys is left out: it has no weight, so it takes the same time in
all rows. A step computes the forward pass, and the gradients of the activations and of
the weights, in bfloat16. The other rows wrap the matrices by
`eqquant.training.low_precision`.

The script needs libtpu, but no TPU. Times are estimates for all operations of the
compiled program, not measurements: the compiler's own, and for Pallas kernels those of
their schedules. "ideal" is the time of the products at the peak rate of bfloat16 over
this estimate.
"""

import argparse

import _paths  # noqa: F401
import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
from _tables import add_output_options, output, print_table
from _tpu_schedule import DEVICES, estimate
from eqquant.debug import compile_for_tpu


SIZE, KV_SIZE, HIDDEN = 4096, 1024, 14336


class Layer(eqx.Module):
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    o: eqx.nn.Linear
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norms: list[eqx.nn.RMSNorm]

    def __init__(self, key):
        def linear(inputs, outputs):
            return eqx.nn.Linear(
                inputs, outputs, use_bias=False, dtype=jnp.bfloat16, key=key
            )

        self.q, self.o = linear(SIZE, SIZE), linear(SIZE, SIZE)
        self.k, self.v = linear(SIZE, KV_SIZE), linear(SIZE, KV_SIZE)
        self.gate, self.up = linear(SIZE, HIDDEN), linear(SIZE, HIDDEN)
        self.down = linear(HIDDEN, SIZE)
        self.norms = [eqx.nn.RMSNorm(SIZE, dtype=jnp.bfloat16) for _ in range(2)]

    def __call__(self, x):
        y = self.norms[0](x)
        # Instead of attention: all matrices have gradients, and products take the time.
        x = x + self.o(self.q(y) * jnp.dot(self.k(y), self.v(y)))
        y = self.norms[1](x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


def step_of(recipe: str | None):
    """Return a function from arrays of the layer and tokens to all gradients, and these
    abstract arrays."""
    layer = eqx.filter_eval_shape(Layer, jax.random.key(0))
    is_abstract = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    arrays, static = eqx.partition(layer, is_abstract)

    def step(arrays, x):
        model = eqx.combine(arrays, static)
        if recipe is not None:
            model = eqquant.training.low_precision(model, recipe)

        def loss(both):
            return jnp.sum(jax.vmap(both[0])(both[1]).astype(jnp.float32) ** 2)

        by_model, by_x = eqx.filter_grad(loss)((model, x))
        return eqquant.training.master_weights(by_model), by_x

    return step, arrays


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=DEVICES, default=["v5e", "v6e"])
    parser.add_argument("--recipes", nargs="+", default=["int8"])
    parser.add_argument("--tokens", type=int, default=4096)
    add_output_options(parser)
    options = parser.parse_args()
    weights = 2 * SIZE * (SIZE + KV_SIZE) + 3 * SIZE * HIDDEN
    table = [["chip", "products", "ms", "ideal", "speed", "MiB of temporaries"]]
    for chip in options.chips:
        device, baseline = DEVICES[chip], None
        macs = 3 * weights * options.tokens
        for recipe in (None, *options.recipes):
            step, arrays = step_of(recipe)
            x = jax.ShapeDtypeStruct((options.tokens, SIZE), jnp.bfloat16)
            found = estimate(step, arrays, x, chip=chip, compile=compile_for_tpu)
            baseline = baseline or found.seconds
            table.append(
                [
                    chip,
                    recipe or "bfloat16",
                    f"{1e3 * found.seconds:.1f}",
                    f"{device.roofline(0, macs) / found.seconds:.0%}",
                    f"{baseline / found.seconds:.2f}",
                    f"{found.temporary / 2**20:.0f}",
                ]
            )
    with output(options):
        print(f"{options.tokens} tokens\n")
        print_table(table, options.markdown)


if __name__ == "__main__":
    main()
