"""Run a language model of one library in a separate process.

    python benchmarks/_run_decoder.py KIND VARIANT FILE SHAPE_AS_JSON THREADS [CLOCK]

Without `--serve`, the script writes the file of the model. With `--serve`, it loads the
file and executes commands from standard input, one per line: `prepare N CONTEXT`,
`prefill`, `decode N CONTEXT STEPS`, `memory`, `peak` or `elapsed`. It answers each
command with one line, which contains megabytes, or seconds of CLOCK: `perf_counter`
(default) or `process_time`. `elapsed` returns the processor time since the start of the
process. The environment need not contain eqquant.
"""

import gc
import importlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable

from _decoders import Decoder, Shape


# The lines of `/proc/self/status` with the memory of this process.
_memory = {"memory": "VmRSS", "peak": "VmHWM"}


def resident(line: str) -> float:
    """Return the memory of this process in MB."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines[line].split()[0]) / 1e3


def execute(decoder: Decoder, words: list[str], clock: Callable[[], float]) -> float:
    if words[0] in _memory:
        gc.collect()
        return resident(_memory[words[0]])
    if words[0] == "elapsed":
        return time.process_time()
    start = clock()
    getattr(decoder, words[0])(*map(int, words[1:]))
    return clock() - start


def main() -> None:
    kind, variant, file, shape, threads = sys.argv[1:6]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
    # Redirect the output of libraries, so that it does not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    library = importlib.import_module(f"_decoders.{kind}")
    model_shape, path = Shape(**json.loads(shape)), pathlib.Path(file)
    if "--serve" not in sys.argv:
        part = path.with_name(f"part-{path.name}")
        library.make(model_shape, variant, part)
        part.replace(path)
        return
    names = [word for word in sys.argv[6:] if word != "--serve"]
    clock = getattr(time, names[0] if names else "perf_counter")
    start = clock()
    decoder = library.load(model_shape, variant, path, int(threads))
    load_seconds = clock() - start
    print(json.dumps([load_seconds, decoder.version()]), file=answers, flush=True)
    for line in sys.stdin:
        print(execute(decoder, line.split(), clock), file=answers, flush=True)


if __name__ == "__main__":
    main()
