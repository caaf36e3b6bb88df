"""Run one GGUF file here and in llama.cpp."""

import argparse
import dataclasses
import json
import math
import sys
import time

from _decoders import Shape
from _environments import install
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
from _tables import print_table


VARIANTS = {
    'eqquant, "high"': ("eqquant", "high"),
    'eqquant, "default"': ("eqquant", "default"),
    "llama.cpp": ("llama_cpp", "defaults"),
    "llama.cpp, flash attention off": ("llama_cpp", "no flash attention"),
}
# Sequences, and tokens before the tokens that are timed.
DECODE = ((1, 0), (1, 2_000), (8, Shape.prompt))


def compare(options: argparse.Namespace) -> None:
    read_into_cache(options.gguf)
    results, missing = {}, []
    try:
        for variant in VARIANTS:
            try:
                results[variant] = _prepared(variant, options)
            except RuntimeError as problem:
                missing.append(f"{variant}: {problem}")
        tasks: dict[str, tuple] = {"prefill": ("prefill",)}
        for sequences, context in DECODE:
            command = ("decode", sequences, context, options.steps)
            tasks[_title(sequences, context)] = command
        if results:
            measure(results, tasks, options.rounds)
            print(f"\n{options.gguf.name}, {options.threads} threads\n")
            print_table(_rows(results, options.steps), options.markdown)
            print()
    finally:
        for result in results.values():
            result.process.close()
    for version in dict.fromkeys(r.process.version for r in results.values()):
        print(version)
    for line in missing:
        print(f"NOT MEASURED: {line}")


def _title(sequences: int, context: int) -> str:
    many = "" if sequences == 1 else f"{sequences} sequences, "
    return f"decode: {many}context {context:,}"


def _prepared(variant: str, options: argparse.Namespace) -> Result:
    kind, argument = VARIANTS[variant]
    python = sys.executable
    if kind == "llama_cpp":
        peer = llama_cpp.peer
        python = install(peer.name, peer.packages, options.cache, peer.header)
    described = json.dumps(dataclasses.asdict(Shape()))
    path, threads = str(options.gguf.resolve()), str(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    command = [python, SCRIPT, kind, argument, path, described, threads]
    if options.processor_time:
        command.append("process_time")
    process = Process(command, options.folder / f"{kind}-{argument}.log")
    try:
        process("prefill")
        first = time.perf_counter() - process.start
        if options.processor_time:
            first = process("elapsed")
        ready = [case for case in DECODE if case[0] == 1]
        for case in ready:
            process("prepare", *case)
        peak = process("peak")
        for case in DECODE:
            if case not in ready:
                process("prepare", *case)
    except BaseException:
        process.close()
        raise
    note(f"ready: {variant}")
    return Result(process, first, peak)


def _rows(results: dict[str, Result], steps: int) -> list[list[str]]:
    """Format the results as a table."""
    tokens = {"prefill": Shape.prompt}
    tokens |= {_title(*case): case[0] * steps for case in DECODE}
    against = "x llama.cpp"
    head = ["", "load s", "first token s"]
    for task in tokens:
        head += [f"{task}: tokens/s", against]
    table = [[*head, "peak MB", against]]
    peers = [results[name] for name in results if VARIANTS[name][0] == "llama_cpp"]
    for variant, result in results.items():
        row = [variant, f"{result.process.load:.2f}", f"{result.first:.2f}"]
        for task, count in tokens.items():
            row.append(best_and_median(count, result.times[task]))
            fastest = min(peers, key=lambda peer: min(peer.times[task]), default=None)
            row.append(ratio(fastest, result, task))
        row.append(f"{result.memory:.0f}")
        least = min((peer.memory for peer in peers), default=math.nan)
        row.append(f"{result.memory / least:.2f}")
        table.append(row)
    return table
