"""Fine-tune a quantized model from a folder or a GGUF file with adapters (QLoRA).

    python examples/llama/finetune.py FOLDER notes.txt --output ADAPTERS
    python examples/llama/finetune.py FOLDER chats.jsonl --format nf4 --rank 16
    python examples/llama/finetune.py MODEL.gguf notes.txt
    python examples/llama/finetune.py MODEL.gguf notes.txt --low-precision int8 \
        --states fp8

Without `--format`, the weights of a GGUF file keep their formats.

A line of a `.jsonl` file is a text, `{"text": "..."}`, or a chat,
`{"messages": [{"role": "user", "content": "..."}, ...]}`. Any other file is one text.
Texts are packed in rows, and do not attend to each other. The adapters are saved
separately, in PEFT's layout, for `generate.py --adapters`. An interrupted run resumes
from its last checkpoint; `--fresh` starts again.
"""

import argparse
import json
import pathlib
import sys
import zlib

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from fitting import fit
from load import can_stack, load_in, open_model
from lora import add_adapters, save_adapters
from model import Decoder
from packing import batch_at, losses, pack, Rows
from precision import parse_with_precision
from text import Text


HERE = pathlib.Path(__file__).parent
# Like QLoRA: NF4 with double quantization.
FORMATS = {
    "float32": None,
    "int8": eqquant.Int8(),
    "nf4": eqquant.NF4(double_quantization=True),
}


def read_texts(path: pathlib.Path) -> list:
    """Return the texts and chats of a file."""
    content = path.read_text("utf-8")
    if path.suffix != ".jsonl":
        if not content.strip():
            raise ValueError(f"{path} is empty.")
        return [content]
    texts = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}.") from None
        match entry:
            case {"text": str(found)} | {"messages": list(found)} if found:
                texts.append(found)
            case _:
                raise ValueError(
                    f"{path}, line {number}: expected an object with a 'text' or with "
                    f"'messages', got {line:.60}"
                )
    if not texts:
        raise ValueError(f"{path} is empty.")
    return texts


def optimiser_of(options):
    schedule = optax.warmup_cosine_decay_schedule(
        0, options.rate, max(1, options.steps // 10), options.steps
    )
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0)
    )
    if options.states:
        optimiser = eqquant.training.quantized_state(optimiser, options.states)
    return optimiser


def make_step(optimiser, options):
    """Return `step(trainable, frozen, state, rows, key)`."""
    strict = eqquant.quaxify(losses, on_materialise="error")

    @eqx.filter_jit
    def step(trainable, frozen, state, rows, key):
        def mean(trainable):
            model = eqx.combine(trainable, frozen)
            if options.dropout:
                model = eqquant.training.with_dropout_key(model, key)
            if options.stochastic:
                model = eqquant.training.with_rounding_key(model, key)
            total, count = strict(model, rows, remat=True)
            return total / jnp.maximum(count, 1)

        loss, gradients = eqx.filter_value_and_grad(mean)(trainable)
        updates, state = optimiser.update(gradients, state, trainable)
        return eqx.apply_updates(trainable, updates), state, loss

    return step


def print_memory(trainable, state, step) -> None:
    """Print the memory of training, except the frozen weights."""
    sizes = [eqquant.trees.nbytes(x) / 1e6 for x in (trainable, state)]
    temporary = step.compiled.memory_analysis().temp_size_in_bytes / 1e6
    print(
        f"Adapters: {sizes[0]:.2f} MB. States of the optimiser: {sizes[1]:.2f} MB. "
        f"Temporary arrays of a step: {temporary:.1f} MB"
    )


def train(model: Decoder, rows: Rows, options) -> tuple[Decoder, list[float]]:
    """Return the model with trained adapters, and the loss of each step in nats per
    token."""
    key, step_key = jax.random.split(jax.random.key(options.seed))
    model = add_adapters(
        model, options.rank, alpha=options.alpha, dropout=options.dropout, key=key
    )
    if options.recipe is not None:
        is_adapted = lambda x: isinstance(x, eqquant.arrays.LoraArray)
        model = eqquant.training.low_precision(model, options.recipe, where=is_adapted)
    trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))
    optimiser = optimiser_of(options)
    state = optimiser.init(trainable)

    def arguments(i, trainable, state):
        batch = batch_at(rows, i, options.batch, options.seed)
        return trainable, frozen, state, batch, jax.random.fold_in(step_key, i)

    step = make_step(optimiser, options).lower(*arguments(0, trainable, state))
    step = step.compile()
    print_memory(trainable, state, step)

    fields = ["format", "rank", "alpha", "dropout", "rate", "batch", "length", "seed"]
    fields += ["low_precision", "stochastic", "states"]
    trainable, history = fit(
        lambda *numbered: step(*arguments(*numbered)),
        trainable,
        state,
        path=options.output / "training.eqx",
        steps=options.steps,
        save_every=options.save_every,
        text=zlib.crc32(rows.tokens.tobytes()),
        model=repr(model.config),
        **{name: getattr(options, name) for name in fields},
    )
    model = eqquant.training.master_weights(eqx.combine(trainable, frozen))
    return model, history.tolist()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", type=pathlib.Path, help="Read a Hugging Face folder, or a GGUF file."
    )
    parser.add_argument(
        "data",
        type=pathlib.Path,
        help="Train on a text, or on a .jsonl file of texts and chats.",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="Quantize the weights to this format. The default is nf4 for folders, "
        "and the format of the file for GGUF.",
    )
    parser.add_argument(
        "--rank",
        type=int,
        default=8,
        help="Use adapters of this rank (default: %(default)s).",
    )
    parser.add_argument(
        "--alpha",
        type=float,
        help="Multiply adapters by alpha / rank. The default is twice the rank.",
    )
    parser.add_argument(
        "--dropout",
        type=float,
        default=0.0,
        help="Drop this share of the inputs of adapters (default: %(default)s).",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=100,
        help="Train for this many steps (default: %(default)s).",
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=4,
        help="Put this many rows into a batch (default: %(default)s).",
    )
    parser.add_argument(
        "--length",
        type=int,
        default=256,
        help="Put this many tokens into a row (default: %(default)s).",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=1e-3,
        help="Use this learning rate (default: %(default)s).",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="Initialise the adapters and shuffle the data with this seed (default: "
        "%(default)s).",
    )
    parser.add_argument(
        "--save-every",
        type=int,
        default=20,
        help="Save the state after this many steps (default: %(default)s).",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="Start again instead of resuming an interrupted run.",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=HERE.parent / "output" / "adapters",
        help="Write the adapters to this folder (default: examples/output/adapters).",
    )
    options = parse_with_precision(parser, arguments)
    for name in ("rank", "steps", "batch", "length", "save_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    options.alpha = options.alpha or 2.0 * options.rank
    return options


def run(options) -> list[float]:
    source = open_model(options.model)
    text = Text(source)
    texts = read_texts(options.data)
    rows = pack([text.encode_document(x) for x in texts], options.length)
    is_stack = options.format is not None or can_stack(source)
    model = load_in(source, options.format, FORMATS, stacked=is_stack)
    print(f"{len(texts)} texts in {len(rows.tokens)} rows of {options.length} tokens")
    if options.fresh:
        (options.output / "training.eqx").unlink(missing_ok=True)
    model, history = train(model, rows, options)
    save_adapters(options.output, model, source.kind)
    trained = eqquant.trees.nbytes(eqx.filter(model, eqquant.trainable_mask(model)))
    few = max(1, min(10, len(history) // 2))
    first, last = (sum(x) / few for x in (history[:few], history[-few:]))
    print(
        f"Loss {first:.3f} at first, {last:.3f} at the end. Adapters of "
        f"{trained / 1e6:.2f} MB, beside "
        f"{eqquant.trees.nbytes(model) / 1e6:.1f} MB in all: {options.output}"
    )
    return history


def main(arguments: list[str] | None = None) -> list[float]:
    options = parse(arguments)
    try:
        return run(options)
    except (ValueError, ImportError, OSError, FloatingPointError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
