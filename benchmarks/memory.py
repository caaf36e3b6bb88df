"""Measure the memory of a language model after each stage of its start.

    python benchmarks/memory.py MODEL.gguf
    python benchmarks/memory.py MODEL.gguf --contexts 0 --markdown

The stages follow each other in one process. Columns, in MB:

- "resident" is the memory after the stage, and "more" the difference to the stage
  before. It contains the pages of libraries.
- "peak" is the largest memory until then.

"JAX alone" is a process that imports JAX, and compiles and runs a product of 64 x 64
matrices. Every program with JAX takes that much.
"""

import argparse
import gc
import importlib
import os
import pathlib
import subprocess
import sys

from _decoders import Shape
from _run_decoder import resident
from _tables import add_output_options, output, print_table


_ALONE = """
import jax, jax.numpy as jnp
from _run_decoder import resident
x = jnp.ones((64, 64))
jax.jit(lambda x: jnp.tanh(x @ x))(x).block_until_ready()
print(resident("VmHWM"))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=pathlib.Path, help="a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contexts", type=int, nargs="+", default=[0, 2_000])
    add_output_options(parser)
    options = parser.parse_args()
    with output(options):
        print_table(_rows(options), options.markdown)


def _rows(options: argparse.Namespace) -> list[list[str]]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    os.environ["JAX_PLATFORMS"] = "cpu"  # A plugin for TPUs would take 80 MB.
    here = pathlib.Path(__file__).parent
    alone = subprocess.run(
        [sys.executable, "-c", _ALONE], cwd=here, check=True, stdout=subprocess.PIPE
    )
    rows = [["", "resident", "more", "peak"]]
    rows.append(["JAX alone", *[""] * 2, f"{float(alone.stdout):.0f}"])
    before = 0.0

    def add(stage: str) -> None:
        nonlocal before
        gc.collect()
        now, peak = resident("VmRSS"), resident("VmHWM")
        rows.append([stage, f"{now:.0f}", f"{now - before:.0f}", f"{peak:.0f}"])
        before = now

    add("Python and NumPy")
    importlib.import_module("jax")
    add("import JAX")
    importlib.import_module("eqquant")
    add("import eqquant")
    decoders = importlib.import_module("_decoders.eqquant")
    add("import the example")
    runs = decoders.load(Shape(), "high", options.model, options.threads)
    add("load the weights and tokens of the file")
    runs.prefill()
    add(f"compile and process {Shape.prompt} tokens")
    for context in options.contexts:
        runs.prepare(1, context)
        add(f"compile and generate a token after {context:,}")
    return rows


if __name__ == "__main__":
    main()
