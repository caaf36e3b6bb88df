"""A decoder, in a process of its own, where eqquant need not be installed.

    python benchmarks/_run_decoder.py KIND VARIANT FILE SHAPE_AS_JSON THREADS

makes the file. With `--serve` it loads it, and does what lines on its standard input
say, one after the other: `prepare N`, `prefill`, `decode N STEPS` or `memory`. To each
it answers with a line: seconds, or megabytes.
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
    """Megabytes of this process."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmRSS"].split()[0]) / 1e3


def do(decoder: Decoder, words: list[str]) -> float:
    if words[0] == "memory":
        gc.collect()
        return resident()
    start = time.perf_counter()
    getattr(decoder, words[0])(*map(int, words[1:]))
    return time.perf_counter() - start


def main() -> None:
    kind, variant, file, shape, threads = sys.argv[1:6]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    library = importlib.import_module(f"_decoders.{kind}")
    of, path = Shape(**json.loads(shape)), pathlib.Path(file)
    if "--serve" not in sys.argv:
        part = path.with_name(f"part-{path.name}")
        library.make(of, variant, part)
        part.replace(path)
        return
    start = time.perf_counter()
    decoder = library.load(of, variant, path, int(threads))
    taken = time.perf_counter() - start
    print(json.dumps([taken, decoder.version()]), file=answers, flush=True)
    for line in sys.stdin:
        print(do(decoder, line.split()), file=answers, flush=True)


if __name__ == "__main__":
    main()
