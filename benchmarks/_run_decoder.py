"""Run a language model of one library in a separate process.

    python benchmarks/_run_decoder.py KIND VARIANT FILE SHAPE_AS_JSON THREADS

Without `--serve`, the script writes the file of the model. With `--serve`, it loads the
file and executes commands from standard input, one per line: `prepare N`, `prefill`,
`decode N STEPS` or `memory`. It answers each command with one line, which contains
seconds or megabytes. The environment need not contain eqquant.
"""

import gc
import importlib
import json
import os
import pathlib
import sys
import time

from _decoders import Decoder, Shape


def resident() -> float:
    """Return the resident memory of this process in MB."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmRSS"].split()[0]) / 1e3


def execute(decoder: Decoder, words: list[str]) -> float:
    if words[0] == "memory":
        gc.collect()
        return resident()
    start = time.perf_counter()
    getattr(decoder, words[0])(*map(int, words[1:]))
    return time.perf_counter() - start


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
    start = time.perf_counter()
    decoder = library.load(model_shape, variant, path, int(threads))
    load_seconds = time.perf_counter() - start
    print(json.dumps([load_seconds, decoder.version()]), file=answers, flush=True)
    for line in sys.stdin:
        print(execute(decoder, line.split()), file=answers, flush=True)


if __name__ == "__main__":
    main()
