"""Train a language model with ternary weights, like BitNet b1.58.

The model is a character-level transformer with rotary positions. It scans over its
layers, and recomputes each layer in the backward pass. It is trained twice, from the
same initial weights and on the same batches: in floating point, and with ternary
weights and int8 activations (arXiv 2402.17764). The model contains no quantization
code.

The text is Python's reference, as `help()` shows it: the module `pydoc_data.topics` of
the standard library, under the PSF licence. Every tenth topic is held out for
validation.

    python examples/bitnet_lm.py
    python examples/bitnet_lm.py --steps 100 --output /tmp/bitnet

An interrupted run resumes.
"""

import argparse
import functools as ft
import math
import pathlib
import platform
from pydoc_data import topics

import _checkpoint
import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from tqdm import tqdm


matplotlib.use("Agg")
import matplotlib.pyplot as plt


HERE = pathlib.Path(__file__).parent
LAYERS, SIZE, HEADS, CONTEXT, BATCH = 3, 128, 4, 128, 8
# Training steps per compiled call, and per point of the plot.
STEPS_PER_CALL = 20
# Calls between validations and checkpoints.
SAVE_EVERY = 5

# Each weight has one scale, its mean magnitude. Products round the activations of each
# token to int8. The embedding and the head stay in floating point.
BITNET = eqquant.Ternary(rule="absmean", least_squares=False)
RULES = {"blocks.*": eqquant.trees.QuantizationRule(BITNET, axis=(-2, -1)), "*": None}


#
# The model
#


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    rope: eqx.nn.RotaryPositionalEmbedding
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norms: list[eqx.nn.RMSNorm]

    def __init__(self, *, key):
        a, b, c, d = jax.random.split(key, 4)
        self.attention = eqx.nn.MultiheadAttention(HEADS, SIZE, key=a)
        self.rope = eqx.nn.RotaryPositionalEmbedding(SIZE // HEADS)
        linear = ft.partial(eqx.nn.Linear, use_bias=False)
        self.gate = linear(SIZE, 3 * SIZE, key=b)
        self.up = linear(SIZE, 3 * SIZE, key=c)
        self.down = linear(3 * SIZE, SIZE, key=d)
        # One norm before each group of weights that share an input.
        self.norms = [eqx.nn.RMSNorm(n) for n in (SIZE, SIZE, 3 * SIZE)]

    def __call__(self, x: Float[Array, "length size"]) -> Float[Array, "length size"]:
        before_attention, before_mlp, before_down = map(jax.vmap, self.norms)

        def rotate(query, key, value):
            turn = jax.vmap(self.rope, in_axes=1, out_axes=1)
            return turn(query), turn(key), value

        y = before_attention(x)
        causal = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(y, y, y, causal, process_heads=rotate)
        y = before_mlp(x)
        hidden = jax.nn.silu(jax.vmap(self.gate)(y)) * jax.vmap(self.up)(y)
        return x + jax.vmap(self.down)(before_down(hidden))


class Transformer(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: Block  # All layers, stacked.
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, vocabulary: int, *, key):
        a, b, c = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(vocabulary, SIZE, key=a)
        keys = jax.random.split(b, LAYERS)
        self.blocks = eqx.filter_vmap(lambda key: Block(key=key))(keys)
        self.norm = eqx.nn.RMSNorm(SIZE)
        self.head = eqx.nn.Linear(SIZE, vocabulary, key=c)

    def __call__(
        self, characters: Int[Array, " length"]
    ) -> Float[Array, "length vocabulary"]:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def layer(x, arrays):
            return eqx.combine(arrays, static)(x), None

        x, _ = jax.lax.scan(layer, jax.vmap(self.embedding)(characters), arrays)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


#
# The text
#


def read_text() -> tuple[np.ndarray, np.ndarray, int]:
    """Return training text, validation text, and the size of the alphabet."""
    pages = [text for _, text in sorted(topics.topics.items())]
    training = "\n".join(page for i, page in enumerate(pages) if i % 10)
    validation = "\n".join(pages[::10])
    alphabet = sorted(set(training))
    index = {character: i for i, character in enumerate(alphabet)}
    # Characters that are not in the training text become the first character.
    encode = lambda text: np.array([index.get(c, 0) for c in text], np.int32)
    return encode(training), encode(validation), len(alphabet)


def batch_of(text: Int[Array, " characters"], key) -> Int[Array, "batch length"]:
    starts = jax.random.randint(key, (BATCH,), 0, len(text) - CONTEXT - 1)
    cut = lambda start: jax.lax.dynamic_slice(text, (start,), (CONTEXT + 1,))
    return jax.vmap(cut)(starts)


#
# Training
#


def bits_per_character(model, batch: Int[Array, "batch length"]) -> Float[Array, ""]:
    logits = jax.vmap(model)(batch[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return loss.mean() / math.log(2)


@eqx.filter_jit
def validate(model, text: Int[Array, " characters"]) -> Float[Array, ""]:
    """Return the loss on all of the text, in pieces."""
    length = CONTEXT + 1
    pieces = text[: len(text) // length * length].reshape(-1, length)
    pieces = pieces[: len(pieces) // BATCH * BATCH].reshape(-1, BATCH, length)
    losses = jax.lax.map(lambda batch: bits_per_character(model, batch), pieces)
    return losses.mean()


def adamw(rate: float, steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0, rate, steps // 10, steps)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01)
    )


@eqx.filter_jit
def several_steps(model, state, text: Int[Array, " characters"], call, *schedule):
    """Run several training steps in one program, by a scan."""
    optimiser = adamw(*schedule)
    arrays, static = eqx.partition((model, state), eqx.is_array)

    def step(arrays, key):
        model, state = eqx.combine(arrays, static)
        value_and_grad = eqx.filter_value_and_grad(bits_per_character)
        loss, gradients = value_and_grad(model, batch_of(text, key))
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimiser.update(gradients, state, params)
        model = eqx.apply_updates(model, updates)
        return eqx.filter((model, state), eqx.is_array), loss

    keys = jax.random.split(jax.random.key(call), STEPS_PER_CALL)
    arrays, losses = jax.lax.scan(step, arrays, keys)
    return *eqx.combine(arrays, static), losses.mean()


def train(model, text, validation, *, steps, rate, path, label):
    """Return the trained model and its history of bits per character."""
    calls, schedule = steps // STEPS_PER_CALL, (rate, steps)
    state = adamw(*schedule).init(eqx.filter(model, eqx.is_inexact_array))
    configuration = {"steps": steps, "rate": rate, "python": platform.python_version()}
    history = np.full((2, calls), np.nan)
    restored = _checkpoint.restore(path, (model, state, history, 0), **configuration)
    model, state, history, done = restored
    progress = tqdm(total=steps, initial=done * STEPS_PER_CALL, desc=label, unit="step")
    for call in range(done, calls):
        # An array, so that a new value does not recompile.
        inputs = model, state, text, jnp.asarray(call)
        model, state, loss = several_steps(*inputs, *schedule)
        history[0, call] = loss
        if (call + 1) % SAVE_EVERY == 0 or call + 1 == calls:
            history[1, call] = validate(model, validation)
            saved = model, state, history, call + 1
            _checkpoint.save(path, saved, **configuration)
        progress.set_postfix_str(f"{loss:.3f} bits per character")
        progress.update(STEPS_PER_CALL)
    progress.close()
    return model, history


#
# The output
#


def plot(curves: dict, path: pathlib.Path) -> None:
    figure, axis = plt.subplots(figsize=(5.6, 3.6), layout="constrained")
    for (name, history), colour in zip(
        curves.items(), ("tab:blue", "tab:orange"), strict=True
    ):
        steps = STEPS_PER_CALL * np.arange(1, history.shape[1] + 1)
        axis.plot(steps, history[0], color=colour, alpha=0.4, linewidth=1)
        known = ~np.isnan(history[1])
        label = f"{name}: {history[1, -1]:.3f}"
        axis.plot(steps[known], history[1, known], "o-", color=colour, label=label)
    axis.set(xlabel="Step", ylabel="Bits per character", ylim=(None, 5))
    axis.set_title("On held-out pages (thin: on training pages)")
    axis.legend()
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps",
        type=int,
        default=500,
        help="Train each model for this many steps (default: %(default)s).",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=3e-3,
        help="Use this learning rate (default: %(default)s).",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=HERE / "output",
        help="Write checkpoints and the plot to this folder (default: "
        "examples/output).",
    )
    options = parser.parse_args()
    if options.steps < STEPS_PER_CALL:
        parser.error(f"--steps must be {STEPS_PER_CALL} or more")

    *texts, vocabulary = read_text()
    text, validation = map(jnp.asarray, texts)
    print(
        f"Python {platform.python_version()}'s own reference: {len(text):,} characters "
        f"to train on, {len(validation):,} to validate on, {vocabulary} different"
    )
    start = Transformer(vocabulary, key=jax.random.key(0))
    ternary = eqquant.FakeQuantized(start, None, rules=RULES, activations="int8")
    models, curves = {}, {}
    for name, model in {"float": start, "ternary": ternary}.items():
        models[name], curves[name] = train(
            model,
            text,
            validation,
            steps=options.steps,
            rate=options.rate,
            path=options.output / "bitnet_lm" / f"{name}.eqx",
            label=name,
        )
    models["quantized"] = models["ternary"].quantized()

    bits = {name: float(validate(m, validation)) for name, m in models.items()}
    blocks = {
        "float": models["float"].blocks,
        "ternary": models["ternary"].model.blocks,
        "quantized": models["quantized"].blocks,
    }
    print(f"\n{'':24} bits per character   bytes of the blocks")
    for name, value in bits.items():
        print(f"{name:24} {value:18.4f} {eqquant.trees.nbytes(blocks[name]):21,}")
    print(f"quantized to float: {100 * (bits['quantized'] / bits['float'] - 1):+.2f} %")
    path = options.output / "bitnet_lm.png"
    plot(curves, path)
    print(f"\nPlot: {path}")


if __name__ == "__main__":
    main()
