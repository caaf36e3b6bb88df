"""What quantizing a model from a folder costs: its bytes, how well it foresees text, and
how fast it writes; with a sample of each format.

    python examples/llama/evaluate.py examples/output/small

The text is the part of Python's documentation that `train_small.py` holds out.
"""

import argparse
import math
import pathlib
import time

import eqquant
import equinox as eqx
import jax.numpy as jnp
import numpy as np
from documentation import read_documents
from generate import Generator
from load import load_model
from packing import losses, pack, Rows
from sampling import Sampling
from text import Text


FORMATS = {
    "float32": None,
    "bfloat16": None,
    "int8": eqquant.Int8(),
    "nf4": eqquant.NF4(),
    "nf4 twice quantized": eqquant.NF4(double_quantization=True),
    "ternary": eqquant.Ternary(block_size=32),
}
BATCH = 8


def bits(model, rows: Rows) -> float:
    """The information in all of the rows, as the model sees it."""
    step = eqx.filter_jit(eqquant.quaxify(losses, on_materialise="error"))
    pad = -len(rows.tokens) % BATCH
    wide = ((0, pad), (0, 0))
    rows = Rows(
        np.pad(rows.tokens, wide), np.pad(rows.segments, wide, constant_values=-1)
    )
    total = 0.0
    for i in range(0, len(rows.tokens), BATCH):
        batch = rows.take(slice(i, i + BATCH))
        total += float(step(model, Rows(*map(jnp.asarray, batch)))[0])
    return total / math.log(2)


def write(model, text: Text, prompt: str, tokens: int) -> tuple[str, float]:
    """A sample, and how many tokens a second."""
    ids = text.encode(prompt)
    sampling = Sampling(temperature=0.7, top_p=0.9)
    generator = Generator(model, len(ids) + tokens, "int8", sampling)
    generator.compile(len(ids))
    written = [generator.prefill(ids)]
    begin = time.perf_counter()
    for token in generator.decode(written[0], len(ids)):
        written.append(token)
        if len(written) == tokens:
            break
    seconds = time.perf_counter() - begin
    ends = [i for i, token in enumerate(written) if token in text.stop]
    sample = text.tokenizer.decode(ids + written[: ends[0] if ends else None])
    return sample, (len(written) - 1) / seconds


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--length", type=int, default=256, help="tokens of context")
    parser.add_argument("--rows", type=int, help="use only so many rows of the text")
    parser.add_argument("--prompt", default="class pathlib.Path\n")
    parser.add_argument("--tokens", type=int, default=100, help="of the sample")
    options = parser.parse_args(arguments)
    if options.tokens < 2:
        parser.error(f"--tokens must be 2 or more, got {options.tokens}")

    text = Text(options.folder)
    _, held_out = read_documents()
    rows = pack([text.encode_document(x) for x in held_out], options.length)
    rows = rows.take(slice(options.rows))
    known = rows.segments >= 0
    characters = len(text.tokenizer.decode(rows.tokens[:, 1:][known[:, 1:]].tolist()))
    print(f"Held out: {characters:,} characters in {len(rows.tokens)} rows")
    table = []
    for name in options.formats:
        dtype = jnp.bfloat16 if name == "bfloat16" else jnp.float32
        model = load_model(options.folder, FORMATS[name], dtype=dtype, progress=False)
        sample, speed = write(model, text, options.prompt, options.tokens)
        row = {
            "format": name,
            "bytes": eqquant.tree_nbytes(model),
            "bits": bits(model, rows) / characters,
            "speed": speed,
            "sample": sample,
        }
        table.append(row)
        print(f"{name}: {row['bits']:.4f} bits per character", flush=True)

    print(f"\n{'format':20} {'bytes':>12} {'bits/character':>15} {'tokens/s':>9}")
    for row in table:
        print(
            f"{row['format']:20} {row['bytes']:12,} {row['bits']:15.4f} "
            f"{row['speed']:9.1f}"
        )
    for row in table:
        print(f"\n--- {row['format']}\n{row['sample']}")
    return table


if __name__ == "__main__":
    main()
