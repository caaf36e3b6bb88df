"""Language models, end to end: quantized, dense, and by llama.cpp.

    python benchmarks/decode.py
    python benchmarks/decode.py --small --only float32 int8 q8_0
    python benchmarks/decode.py --markdown

A model of the shape of TinyLlama (1.1 billion parameters, random): `examples/llama` in
float32 and bfloat16, and with weights in INT8, NF4 and ternary; and llama.cpp on GGUF
files of the same numbers in q8_0, q4_0 and tq2_0, every matrix in that type. "default"
is `precision="default"`, which rounds activations to 8 bits; llama.cpp always does.
`EQQUANT_CPU` with less than `amx` also leaves out the kernels for AMX of llama.cpp.

Each is a process of its own, on the same cores. They take turns: only one computes at
a time, and the order changes from round to round. Times are the least of all rounds, in
parentheses the median; ratios are of the least. Prefill is a prompt of 512 tokens,
decode steps of one token for one and for eight sequences that have that prompt behind
them. MB are those of the whole process, its libraries and caches included: with one
sequence, and with all that the table has. Load is the time from a file in the page
cache to a model, compile that of the first call of everything.

The files take 11 GB (a tenth with `--small`), and are kept in a folder (`--folder`);
the processes hold the same in memory. llama.cpp is compiled when it is installed,
which takes a quarter of an hour on two cores.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

from _decoders import Shape
from _environments import CACHE, install, last_line, run
from _peers import llama_cpp
from peers import print_table


HERE = pathlib.Path(__file__).resolve().parent
SEQUENCES = (1, 8)
# How many bytes of a file a parameter takes.
VARIANTS = {
    "float32": ("eqquant", 4.0),
    "bfloat16": ("eqquant", 2.0),
    "int8": ("eqquant", 1.0),
    "int8, default": ("eqquant", 1.0),
    "q8_0": ("llama_cpp", 1.07),
    "nf4": ("eqquant", 0.57),
    "nf4, default": ("eqquant", 0.57),
    "q4_0": ("llama_cpp", 0.57),
    "ternary": ("eqquant", 0.26),
    "ternary, default": ("eqquant", 0.26),
    "tq2_0": ("llama_cpp", 0.26),
}
# What each is compared with, besides float32.
COUNTERPARTS = {"int8": "q8_0", "nf4": "q4_0", "ternary": "tq2_0"}


class Process:
    """A decoder that does what it is told, and says how long it took."""

    def __init__(self, command: list[str], log: pathlib.Path):
        self.log = log
        with open(log, "w") as errors:
            self.popen = subprocess.Popen(
                [*command, "--serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # Nothing for other devices is loaded, which would count as memory.
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
    process: Process
    compile: float
    held: float
    held_with_all: float = 0.0
    times: dict[str, list[float]] = dataclasses.field(default_factory=dict)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
    # The arithmetic of products is in the file.
    name = variant.replace(", ", "-")
    suffix = ".gguf" if kind == "llama_cpp" else ".safetensors"
    about = "-".join(map(str, dataclasses.astuple(shape)[:6]))
    path = options.folder / f"{name}-{about}{suffix}"
    described = json.dumps(dataclasses.asdict(shape))
    script = str(HERE / "_run_decoder.py")
    arguments = [script, kind, variant, str(path), described, str(options.threads)]
    if not path.exists():
        note(f"writing {path}")
        options.folder.mkdir(parents=True, exist_ok=True)
        ran = run(python, *arguments, environment={}, capture_output=True)
        if ran.returncode:
            raise RuntimeError(f"cannot be written: {last_line(ran.stderr)}")
    _read(path)
    return Process([python, *arguments], options.folder / f"{name}.log")


def _read(path: pathlib.Path) -> None:
    """Into the page cache."""
    with open(path, "rb") as file:
        while file.read(1 << 24):
            pass


def prepare(variant: str, options: argparse.Namespace, shape: Shape) -> Result:
    process = start(variant, options, shape)
    try:
        begin = time.perf_counter()
        process("prepare", SEQUENCES[0])
        process("prefill")
        compiled = time.perf_counter() - begin
        held = process("memory")
        for sequences in SEQUENCES[1:]:
            process("prepare", sequences)
    except BaseException:
        process.close()
        raise
    note(f"ready: {variant}")
    return Result(process, compiled, held)


def measure(results: dict[str, Result], options: argparse.Namespace) -> None:
    tasks = {f"decode {n}": ("decode", n, options.steps) for n in SEQUENCES}
    tasks["prefill"] = ("prefill",)
    order = random.Random(0)
    for turn in range(options.rounds):
        for task, words in tasks.items():
            for variant in order.sample(list(results), len(results)):
                result = results[variant]
                taken = result.process(*words)
                if words[0] == "decode":
                    taken /= options.steps
                result.times.setdefault(task, []).append(taken)
        note(f"round {turn + 1} of {options.rounds}")
    for result in results.values():
        result.held_with_all = result.process("memory")


def rows(results: dict[str, Result], shape: Shape) -> list[list[str]]:
    """Tokens in a second, how many times as many as float32 and as the counterpart."""
    tokens = {f"decode {n}": n for n in SEQUENCES} | {"prefill": shape.prompt}
    head = [""]
    for task in tokens:
        head += [f"{task}: tokens/s", "x float32", "x llama.cpp"]
    table = [[*head, "MB", "MB with all", "load s", "compile s"]]

    def ratio(variant: str | None, result: Result, task: str) -> str:
        if variant not in results:
            return "-"
        other = results[variant].times[task]
        return f"{min(other) / min(result.times[task]):.2f}"

    for variant, result in results.items():
        counterpart = COUNTERPARTS.get(variant.split(",")[0])
        row = [variant]
        for task, count in tokens.items():
            times = result.times[task]
            best, middle = count / min(times), count / statistics.median(times)
            row.append(f"{best:.1f} ({middle:.1f})")
            row.append(ratio("float32", result, task))
            row.append(ratio(counterpart, result, task))
        row += [f"{result.held:.0f}", f"{result.held_with_all:.0f}"]
        row += [f"{result.process.load:.1f}", f"{result.compile:.1f}"]
        table.append(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument(
        "--small", action="store_true", help="2 layers, and 4000 words: a quick look"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="tokens in a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=pathlib.Path, default=CACHE)
    parser.add_argument("--folder", type=pathlib.Path, default=CACHE / "decoders")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    shape = Shape(layers=options.layers)
    if options.small:
        shape = Shape(layers=min(2, options.layers), vocabulary=4_000)
    if options.steps >= shape.room:
        parser.error(f"--steps must be less than {shape.room}")

    each = shape.parameters / 1e9, 0.6  # And caches, libraries.
    need = sum(each[0] * VARIANTS[variant][1] + each[1] for variant in options.only)
    if need > available_gb():
        parser.error(
            f"all at a time take {need:.0f} GB of memory, and {available_gb():.0f} are "
            "free; measure some of them (--only), or fewer layers (--layers)"
        )
    results, missing = {}, []
    try:
        for variant in options.only:
            try:
                results[variant] = prepare(variant, options, shape)
            except RuntimeError as problem:
                missing.append(f"{variant}: {problem}")
        if results:
            measure(results, options)
            parameters = f"{shape.parameters / 1e6:.0f} million parameters"
            print(f"\n{shape.layers} layers, {parameters}, {options.threads} threads\n")
            print_table(rows(results, shape), options.markdown)
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
