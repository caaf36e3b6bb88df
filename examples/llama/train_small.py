"""Train a small language model on the documentation of Python.

The result is a Hugging Face folder, which the other examples and other libraries read.
The model is a Llama with 5.8 million parameters and a byte-pair encoding of the same
text. An interrupted run resumes.

    python examples/llama/train_small.py
    python examples/llama/train_small.py --steps 100 --output /tmp/small
    python examples/llama/train_small.py --low-precision int8 --states fp8
"""

import argparse
import json
import pathlib
import platform
import time
import zlib
from collections.abc import Callable
from typing import Literal

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from config import Config
from documentation import read_documents
from fitting import fit
from folder import write_model
from model import Decoder, unstack
from packing import batch_at, losses, pack, Rows
from precision import parse_with_precision
from tokenizers import decoders, models, pre_tokenizers, processors, Tokenizer, trainers


matplotlib.use("Agg")
import matplotlib.pyplot as plt


HERE = pathlib.Path(__file__).parent
BEGIN, END = "<|begin|>", "<|end|>"
CONFIG = Config(
    vocabulary=4096,
    size=256,
    layers=6,
    heads=4,
    kv_heads=2,
    head_size=64,
    hidden=768,
    tied=True,
)
LENGTH, BATCH, RATE = 256, 4, 2e-3
SAVE_EVERY = 50


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BEGIN, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Encode a text with its first and last special tokens."""
    end = tokenizer.token_to_id(END)
    assert end is not None
    return [[*x.ids, end] for x in tokenizer.encode_batch(texts)]


def write_folder(folder: pathlib.Path, model: Decoder) -> None:
    """Write the model in Hugging Face's layout, next to `tokenizer.json`."""
    begin, end = 0, 1
    write_model(folder, model, LENGTH, bos_token_id=begin, eos_token_id=end)
    tokenizer = {"bos_token": BEGIN, "eos_token": END}
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    generation = {"bos_token_id": begin, "eos_token_id": end}
    for name, content in {
        "tokenizer_config.json": tokenizer,
        "generation_config.json": generation,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def adamw(steps: int) -> optax.GradientTransformation:
    warmup = max(1, steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(0, RATE, warmup, steps, RATE / 10)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    )


def make_step(
    config: Config,
    steps: int,
    recipe: eqquant.training.Recipe | None = None,
    states: Literal["fp8", "int8", "fp4"] | None = None,
) -> tuple[Callable, Callable]:
    """Return `init(key)`, which gives a model and the state of its optimiser, and
    `step(batch, model, state)`, which also returns the loss in nats per token.

    `recipe` has the numbers of products, except with the table, and `states` the
    format of the moments of AdamW; None for float32. A batch is a pair of rows and a
    key for stochastic rounding.
    """
    optimiser = adamw(steps)
    if states is not None:
        optimiser = eqquant.training.quantized_state(optimiser, states)
    is_stochastic = recipe is not None and recipe.stochastic

    def init(key):
        model = Decoder(config, key=key)
        if jax.default_backend() == "cpu":
            # With 6 layers or fewer, a program for a stack takes 1.5 times as long.
            # GPUs start fewer kernels for a stack, and compile it sooner.
            model = unstack(model)
        if recipe is not None:
            model = eqquant.training.low_precision(model, recipe)
        return model, optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    def step(batch, model, state):
        rows, key = batch

        def mean(model):
            if is_stochastic:
                model = eqquant.training.with_rounding_key(model, key)
            total, count = losses(model, rows)
            return total / jnp.maximum(count, 1)

        loss, gradients = eqx.filter_value_and_grad(mean)(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimiser.update(gradients, state, params)
        return eqx.apply_updates(model, updates), state, loss

    return init, step


def numbered_batch(rows: Rows, step: int, seed: int):
    """Return the batch of a step, and its key."""
    return batch_at(rows, step, BATCH, seed), jax.random.key(step)


def train(
    rows: Rows,
    config: Config,
    steps: int,
    path: pathlib.Path,
    recipe: eqquant.training.Recipe | None = None,
    states: Literal["fp8", "int8", "fp4"] | None = None,
    seed: int = 0,
):
    """Return the trained model, and the loss of each step in nats per token.

    `seed` determines the first weights and the order of the rows.
    """
    init, step = make_step(config, steps, recipe, states)
    step = eqx.filter_jit(step, donate="all-except-first")
    model, history = fit(
        lambda i, model, state: step(numbered_batch(rows, i, seed), model, state),
        *init(jax.random.key(seed)),
        path=path,
        steps=steps,
        save_every=SAVE_EVERY,
        text=zlib.crc32(rows.tokens.tobytes()),
        config=repr((config, recipe, states, seed)),
    )
    return eqquant.training.master_weights(model), history


def bits(model: Decoder, rows: Rows) -> float:
    """Return the cross entropy of all rows, in bits."""
    run = eqx.filter_jit(losses)
    starts = range(0, len(rows.tokens), BATCH)
    total = sum(float(run(model, rows.take(slice(i, i + BATCH)))[0]) for i in starts)
    return total / float(np.log(2))


def plot(history: np.ndarray, vocabulary: int, path: pathlib.Path) -> None:
    figure, axis = plt.subplots(figsize=(5.6, 3.6), layout="constrained")
    axis.plot(history, color="tab:blue", alpha=0.3, linewidth=0.8)
    width = min(50, len(history))
    smooth = np.convolve(history, np.ones(width) / width, "valid")
    steps = np.arange(len(smooth)) + (width - 1) / 2
    axis.plot(steps, smooth, color="tab:blue", label=f"mean of {width} steps")
    guess = np.log(vocabulary)
    label = f"all tokens equally likely: {guess:.2f}"
    axis.axhline(guess, color="k", linewidth=0.8, linestyle="--", label=label)
    axis.set(xlabel="Step", ylabel="Loss, nats per token")
    axis.set_title(f"A small Llama on Python's documentation: {smooth[-1]:.2f}")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--steps",
        type=int,
        default=1500,
        help="Train for this many steps (default: %(default)s).",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=HERE.parent / "output" / "small",
        help="Write the model, checkpoints and the plot to this folder (default: "
        "examples/output/small).",
    )
    options = parse_with_precision(parser, arguments)
    if options.steps < 1:
        parser.error(f"--steps must be 1 or more, got {options.steps}")

    texts, held_out = read_documents()
    characters = [sum(map(len, x)) for x in (texts, held_out)]
    print(
        f"Python {platform.python_version()} documents itself in {characters[0]:,} "
        f"characters to train on, and {characters[1]:,} that are held out"
    )
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts, CONFIG.vocabulary)
    tokenizer.save(str(options.output / "tokenizer.json"))
    rows = pack(encode(tokenizer, texts), LENGTH)
    size = sum(
        x.size
        for x in jax.tree.leaves(
            eqx.filter_eval_shape(Decoder, CONFIG, key=jax.random.key(0))
        )
    )
    tokens = options.steps * BATCH * LENGTH
    print(
        f"{size:,} parameters; {tokens:,} tokens to train on, which is "
        f"{options.steps * BATCH / len(rows.tokens):.1f} times all of the text"
    )
    begin = time.perf_counter(), time.process_time()
    path = options.output / "training.eqx"
    model, history = train(
        rows, CONFIG, options.steps, path, options.recipe, options.states
    )
    seconds = time.perf_counter() - begin[0], time.process_time() - begin[1]
    write_folder(options.output, model)
    print(
        f"Loss at the end: {history[-50:].mean():.3f} nats a token. "
        f"{seconds[0]:.0f} s, {seconds[1]:.0f} s of all processors"
    )
    held_out_rows = pack(encode(tokenizer, held_out), LENGTH)
    per_character = bits(model, held_out_rows) / characters[1]
    print(f"Held-out text: {per_character:.4f} bits per character")
    picture = options.output / "training.png"
    plot(history, CONFIG.vocabulary, picture)
    print(f"Model: {options.output}\nPlot: {picture}")


if __name__ == "__main__":
    main()
