"""Time language models end to end: quantized, dense, and in llama.cpp.

    python benchmarks/decode.py
    python benchmarks/decode.py --small --only float32 int8 q8_0
    python benchmarks/decode.py --markdown
    python benchmarks/decode.py --gguf MODEL.gguf

The model has the shape of TinyLlama (1.1 billion parameters) and random weights. The
script runs `examples/llama` in float32 and bfloat16 and with INT8, NF4 and ternary
weights. It runs llama.cpp with the same weights in q8_0, q4_0 and tq2_0; every matrix
has that type. "default" is `precision="default"`, which rounds activations to 8 bits,
as llama.cpp always does. Dense layers are separate, and quantized layers are a stack
that products read in place, except in "apart". If `EQQUANT_CPU` excludes AMX, llama.cpp
does not use AMX either.

Each variant is a process on the same cores. Only one process computes at a time, and
the order changes from round to round. Columns:

- "prefill" processes a prompt of 512 tokens. "decode N" generates tokens for N
  sequences after that prompt. Rates are for the shortest round, and in parentheses the
  median.
- "x float32" and "x llama.cpp" are ratios of the shortest times; above 1 is faster.
- "MB" is the memory of the process after the runs with one sequence, and "MB with all"
  after all runs. Both include libraries and caches.
- "load s" is the time from a file in the page cache to a model, and "compile s" the
  time of the first calls.

`--gguf` runs one file instead, at precision "high" and "default" and in llama.cpp. The
columns:

- "load s" is the time from the file to a model, and "first token s" the time from the
  start of the process to the first token after a prompt of 512 tokens. It contains
  imports and compilation.
- "prefill" as above. "context N" is the number of tokens before the timed tokens.
- "peak MB" is the peak memory of the process after prefill and decoding with one
  sequence. It contains the pages of the file that llama.cpp maps.

"x llama.cpp" is the ratio to the better row of llama.cpp: on CPUs, flash attention, its
default, can be slower. Keys and values are in INT8 here, as in
`examples/llama/generate.py`, and in float16 in llama.cpp. As in that program, weights
with the same input are joined, and a token is read while the next one is computed.

The files take 11 GB (1.1 GB with `--small`) on disk (`--folder`), and the processes
need as much memory. Installing llama.cpp compiles it: 15 minutes on two cores.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

import _decode_gguf
from _decoders import Shape
from _environments import CACHE, install, last_line, run
from _peers import llama_cpp
from _processes import (
    best_and_median,
    measure,
    note,
    Process,
    ratio,
    read_into_cache,
    Result,
    SCRIPT,
)
from _tables import add_output_options, output, print_table


SEQUENCES = (1, 8)
# Maps a variant to its library and the bytes per parameter in its file.
VARIANTS = {
    "float32": ("eqquant", 4.0),
    "bfloat16": ("eqquant", 2.0),
    "int8": ("eqquant", 1.0),
    "int8, default": ("eqquant", 1.0),
    "q8_0": ("llama_cpp", 1.07),
    "nf4": ("eqquant", 0.57),
    "nf4, apart": ("eqquant", 0.57),
    "nf4, default": ("eqquant", 0.57),
    "q4_0": ("llama_cpp", 0.57),
    "ternary": ("eqquant", 0.26),
    "ternary, default": ("eqquant", 0.26),
    "tq2_0": ("llama_cpp", 0.26),
}
# The variant of llama.cpp that each format is compared with.
COUNTERPARTS = {"int8": "q8_0", "nf4": "q4_0", "ternary": "tq2_0"}


def available_gb() -> float:
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["MemAvailable"].split()[0]) / 1e6


def start(variant: str, options: argparse.Namespace, shape: Shape) -> Process:
    kind, _ = VARIANTS[variant]
    python = sys.executable
    if kind == "llama_cpp":
        peer = llama_cpp.peer
        python = install(peer.name, peer.packages, options.cache, peer.header)
    # The file stores the precision, so each precision has its own file.
    name = variant.replace(", ", "-")
    suffix = ".gguf" if kind == "llama_cpp" else ".safetensors"
    about = "-".join(map(str, dataclasses.astuple(shape)[:6]))
    path = options.folder / f"{kind}-{name}-{about}{suffix}"
    described = json.dumps(dataclasses.asdict(shape))
    arguments = [SCRIPT, kind, variant, str(path), described, str(options.threads)]
    if not path.exists():
        note(f"writing {path}")
        options.folder.mkdir(parents=True, exist_ok=True)
        ran = run(python, *arguments, environment={}, capture_output=True)
        if ran.returncode:
            raise RuntimeError(f"cannot be written: {last_line(ran.stderr)}")
    read_into_cache(path)
    return Process([python, *arguments], options.folder / f"{name}.log")


def prepare(variant: str, options: argparse.Namespace, shape: Shape) -> Result:
    process = start(variant, options, shape)
    try:
        begin = time.perf_counter()
        process("prepare", SEQUENCES[0], shape.prompt)
        process("prefill")
        compiled = time.perf_counter() - begin
        memory = process("memory")
        for sequences in SEQUENCES[1:]:
            process("prepare", sequences, shape.prompt)
    except BaseException:
        process.close()
        raise
    note(f"ready: {variant}")
    return Result(process, compiled, memory)


def rows(results: dict[str, Result], shape: Shape, steps: int) -> list[list[str]]:
    """Format the results as a table."""
    tokens = {f"decode {n}": n * steps for n in SEQUENCES} | {"prefill": shape.prompt}
    head = [""]
    for task in tokens:
        head += [f"{task}: tokens/s", "x float32", "x llama.cpp"]
    table = [[*head, "MB", "MB with all", "load s", "compile s"]]
    for variant, result in results.items():
        counterpart = COUNTERPARTS.get(variant.split(",")[0], "")
        row = [variant]
        for task, count in tokens.items():
            row.append(best_and_median(count, result.times[task]))
            row.append(ratio(results.get("float32"), result, task))
            row.append(ratio(results.get(counterpart), result, task))
        row += [f"{result.memory:.0f}", f"{result.memory_with_all:.0f}"]
        row += [f"{result.process.load:.1f}", f"{result.first:.1f}"]
        table.append(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument(
        "--gguf",
        type=pathlib.Path,
        help="run this file instead of a random model, here and in llama.cpp",
    )
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="with --gguf: measure the time of the processors, which other processes "
        "change less; with --threads 1",
    )
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument(
        "--small", action="store_true", help="2 layers and a vocabulary of 4000"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="tokens per round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=pathlib.Path, default=CACHE)
    parser.add_argument("--folder", type=pathlib.Path, default=CACHE / "decoders")
    add_output_options(parser)
    options = parser.parse_args()
    shape = Shape(layers=options.layers)
    if options.small:
        shape = Shape(layers=min(2, options.layers), vocabulary=4_000)
    if options.steps >= shape.room:
        parser.error(f"--steps: {options.steps}, but must be less than {shape.room}")

    if options.gguf is not None:
        if not options.gguf.is_file():
            parser.error(f"--gguf: {options.gguf} is not a file")
        with output(options):
            _decode_gguf.compare(options)
        return

    billions, overhead = shape.parameters / 1e9, 0.6  # GB of caches and libraries.
    need = sum(billions * VARIANTS[name][1] + overhead for name in options.only)
    if need > available_gb():
        parser.error(
            f"--only: these variants need {need:.0f} GB of memory, but "
            f"{available_gb():.0f} GB are free. Choose fewer variants or --layers."
        )
    with output(options):
        compare(options, shape)


def compare(options: argparse.Namespace, shape: Shape) -> None:
    results, missing = {}, []
    try:
        for variant in options.only:
            try:
                results[variant] = prepare(variant, options, shape)
            except RuntimeError as problem:
                missing.append(f"{variant}: {problem}")
        if results:
            tasks: dict[str, tuple] = {
                f"decode {n}": ("decode", n, shape.prompt, options.steps)
                for n in SEQUENCES
            }
            tasks["prefill"] = ("prefill",)
            measure(results, tasks, options.rounds)
            for result in results.values():
                result.memory_with_all = result.process("memory")
            parameters = f"{shape.parameters / 1e6:.0f} million parameters"
            print(f"\n{shape.layers} layers, {parameters}, {options.threads} threads\n")
            print_table(rows(results, shape, options.steps), options.markdown)
            print()
    finally:
        for result in results.values():
            result.process.close()
    for version in dict.fromkeys(r.process.version for r in results.values()):
        print(version)
    for line in missing:
        print(f"NOT MEASURED: {line}")


if __name__ == "__main__":
    main()
