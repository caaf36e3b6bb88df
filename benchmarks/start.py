"""Time the start of a language model, from the command to the first token.

    python benchmarks/start.py MODEL.gguf
    python benchmarks/start.py MODEL.gguf --rounds 5 --plot start.png
    python benchmarks/start.py MODEL.gguf --random

The script runs `examples/llama/generate.py`, without and with the compiled programs of
an earlier start in the cache of compiled programs ("first start" and "second start"),
and llama.cpp. Each start is a process of its own. The file is in the page cache, and
Python has the bytecode of all modules after the first round.

Stages overlap: a model loads while its programs are compiled. Columns:

- "parts" is the number of traces, programs or other parts.
- "begin" and "end" are seconds after the command, and "s" is their sum over the parts.
- "CPU s" are the CPU seconds of the process until the end of the stage, on all threads.

`--random` starts a random model of 1.2 billion parameters in Q4_1 (732 MB), with the
tokenizer of the file. `--alone` leaves llama.cpp out.

The table shows the round with the earliest first token, and then the range over
all rounds.
"""

import argparse
import functools as ft
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import NamedTuple

import _random_gguf
from _environments import CACHE, install, last_line, run
from _peers import llama_cpp
from _tables import add_output_options, output, print_table


HERE = pathlib.Path(__file__).resolve().parent
PROMPT = "What is the capital of France?"
LAST = "first token"


class Start(NamedTuple):
    """The parts of each stage, the CPU seconds at its end, and the versions."""

    stages: dict[str, list[tuple[float, float]]]
    cpu: dict[str, float]
    version: str

    @property
    def seconds(self) -> float:
        return self.stages[LAST][-1][1]


def start(python: str, library: str, folder: str, options) -> Start:
    script = str(HERE / "_start_once.py")
    begin = str(time.monotonic())
    arguments = [library, begin, str(options.model), PROMPT, str(options.threads)]
    # Installed packages have bytecode.
    environment = {"XDG_CACHE_HOME": folder, "PYTHONDONTWRITEBYTECODE": ""}
    ran = run(python, script, *arguments, environment=environment, capture_output=True)
    if ran.returncode:
        raise RuntimeError(f"{library}: {last_line(ran.stderr)}")
    return Start(*json.loads(last_line(ran.stdout)))


def measure(options) -> dict[str, list[Start]]:
    """Return the starts of all rounds."""
    peer, python = llama_cpp.peer, None
    if not options.alone:
        python = install(peer.name, peer.packages, options.cache, peer.header)
    found: dict[str, list[Start]] = {}
    for turn in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            ours = ft.partial(start, sys.executable, "eqquant", folder, options)
            found.setdefault("first start", []).append(ours())
            found.setdefault("second start", []).append(ours())
        if python is not None:
            theirs = start(python, "llama_cpp", os.devnull, options)
            found.setdefault("llama.cpp", []).append(theirs)
        print(f"round {turn + 1} of {options.rounds}", file=sys.stderr, flush=True)
    return found


def rows(starts: list[Start]) -> list[list[str]]:
    """Format the fastest of several starts as a table."""
    best = min(starts, key=lambda start: start.seconds)
    table = [["", "parts", "begin", "end", "s", "CPU s"]]
    by_end = sorted(best.stages.items(), key=lambda item: item[1][-1][1])
    for name, parts in by_end:
        numbers = parts[0][0], parts[-1][1], sum(end - begin for begin, end in parts)
        cells = [f"{number:.2f}" for number in (*numbers, best.cpu[name])]
        table.append([name, str(len(parts)), *cells])
    seconds = [start.seconds for start in starts]
    cpu = [start.cpu[LAST] for start in starts]
    spread = lambda x: f"{min(x):.2f} to {max(x):.2f}"
    table.append(["all rounds", str(len(starts)), "", spread(seconds), "", spread(cpu)])
    return table


def plot(found: dict[str, list[Start]], path: pathlib.Path) -> None:
    """Draw a bar for each part of each stage of the fastest starts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = [len(starts[0].stages) for starts in found.values()]
    figure, panels = plt.subplots(
        *(len(found), 1),
        figsize=(6.4, 0.3 * sum(sizes) + 1.5),
        height_ratios=sizes,
        sharex=True,
        layout="constrained",
    )
    for axes, (title, starts) in zip(panels, found.items(), strict=True):
        stages = min(starts, key=lambda start: start.seconds).stages
        for place, (name, parts) in enumerate(stages.items()):
            bars = [(begin, end - begin) for begin, end in parts]
            color = "C1" if name == LAST else "C0"
            axes.broken_barh(bars, (place - 0.4, 0.8), color=color, edgecolor="w")
        axes.set_yticks(range(len(stages)), list(stages))
        axes.invert_yaxis()
        axes.set_title(title, loc="left")
        axes.grid(axis="x", alpha=0.3)
    panels[-1].set_xlabel("seconds after the command")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path, help="a GGUF file")
    parser.add_argument("--random", action="store_true", help="start a random model")
    parser.add_argument("--alone", action="store_true", help="without llama.cpp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=pathlib.Path, default=CACHE)
    parser.add_argument("--plot", type=pathlib.Path, help="write a plot to this file")
    add_output_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.random:
            path = pathlib.Path(folder, "random.gguf")
            _random_gguf.write(path, options.model)
            options.model = path
        options.model.read_bytes()  # Now it is in the page cache.
        found = measure(options)
    with output(options):
        for title, starts in found.items():
            print(f"\n{title}, {starts[0].version}, {options.threads} threads\n")
            print_table(rows(starts), options.markdown)
    if options.plot is not None:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
