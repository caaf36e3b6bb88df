"""Processes that run language models, and their times in alternation."""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from _environments import last_line


SCRIPT = str(pathlib.Path(__file__).resolve().parent / "_run_decoder.py")


class Process:
    """A process that runs a model, executes commands and returns their times.

    **Fields:**

    - `start`: the time when the process was started.
    - `load`: the seconds of loading the model, without imports.
    - `version`: the versions of the library.
    """

    def __init__(self, command: Sequence[str], log: pathlib.Path):
        self.log, self.start = log, time.perf_counter()
        with open(log, "w") as errors:
            self.popen = subprocess.Popen(
                [*command, "--serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # Libraries of other platforms would count as memory.
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
        self.load, self.version = json.loads(self._answer())

    def _answer(self) -> str:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            self.popen.wait()
            raise RuntimeError(last_line(self.log.read_text()))
        return line

    def __call__(self, *words: object) -> float:
        assert self.popen.stdin is not None
        self.popen.stdin.write(" ".join(map(str, words)) + "\n")
        self.popen.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()
        try:
            self.popen.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.popen.kill()


@dataclasses.dataclass
class Result:
    """A process, its seconds to the first token or for the first calls, the MB of its
    memory, and the seconds of each round by task."""

    process: Process
    first: float
    memory: float
    memory_with_all: float = 0.0
    times: dict[str, list[float]] = dataclasses.field(default_factory=dict)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read_into_cache(path: pathlib.Path) -> None:
    """Read a file into the page cache."""
    with open(path, "rb") as file:
        while file.read(1 << 24):
            pass


def measure(
    results: Mapping[str, Result], tasks: Mapping[str, tuple], rounds: int
) -> None:
    """Execute the command of each task in all processes, in an order that changes."""
    order = random.Random(0)
    for turn in range(rounds):
        for task, words in tasks.items():
            for variant in order.sample(list(results), len(results)):
                result = results[variant]
                result.times.setdefault(task, []).append(result.process(*words))
        note(f"round {turn + 1} of {rounds}")


def best_and_median(tokens: int, times: Sequence[float]) -> str:
    """Format the tokens per second of the shortest round and of the median round."""
    best, middle = min(times), sorted(times)[len(times) // 2]
    return f"{tokens / best:.1f} ({tokens / middle:.1f})"


def ratio(other: Result | None, result: Result, task: str) -> str:
    """Format how many times as fast a result is as another result."""
    if other is None:
        return "-"
    return f"{min(other.times[task]) / min(result.times[task]):.2f}"
