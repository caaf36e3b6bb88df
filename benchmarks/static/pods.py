"""Compile language models ahead of time for pods of TPUs, without a TPU.

    python benchmarks/static/pods.py                    # every case
    python benchmarks/static/pods.py 8b-decode-v5e      # cases that match a name
    python benchmarks/static/pods.py 405b --layers 2    # fewer layers compile faster
    python benchmarks/static/pods.py 70b --weights bfloat16

The weights of the models are abstract: nothing is downloaded or allocated. For each
case the script prints the memory per device and whether it fits, the kernels, the
traffic of collectives, and the time to compile. For decoding it also prints the bytes
that a step reads and writes in HBM, relative to the cache and the weights. If a program
does not fit, the script prints the memory that the compiler reports.

It needs libtpu, on Linux: `pip install libtpu`.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import tempfile
import time
from collections import Counter

import _paths  # noqa: F401
import ahead
import equinox as eqx
import jax
from _decoded_on_devices import decoded_on_devices
from _programs import Program
from _tables import add_output_options, output, print_table
from ahead import GIB
from layout import Layout


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    task: str  # "prefill", "decode" or "train".
    topology: str
    mesh: tuple[int, int, int]
    batch: int
    length: int  # Tokens per sequence; in decoding, the capacity of the cache.

    @property
    def name(self) -> str:
        return f"{self.model}-{self.task}-{self.topology}"


CASES = [
    Case("8b", "prefill", "v5e:2x4", (1, 8, 1), 4, 2048),
    Case("8b", "prefill", "v6e:2x4", (1, 8, 1), 4, 2048),
    Case("70b", "prefill", "v5e:4x4", (1, 8, 2), 4, 2048),
    Case("405b", "prefill", "v6e:16x16", (8, 8, 4), 32, 2048),
    Case("8b", "decode", "v5e:2x4", (1, 8, 1), 32, 4096),
    Case("8b", "decode", "v6e:2x4", (1, 8, 1), 32, 4096),
    Case("70b", "decode", "v5e:4x4", (1, 8, 2), 32, 4096),
    Case("70b", "decode", "v6e:4x4", (1, 8, 2), 32, 4096),
    Case("70b", "decode", "v5p:2x2x2", (1, 8, 1), 32, 4096),
    Case("405b", "decode", "v6e:16x16", (8, 8, 4), 128, 4096),
    Case("405b", "train", "v5p:8x8x8", (64, 8, 1), 64, 4096),
    Case("405b", "train", "TPU7x:8x8x4", (64, 8, 1), 64, 4096),
]


class Clock:
    """Records the wall-clock and CPU seconds of each step of compilation."""

    def __init__(self):
        self.last = time.perf_counter(), time.process_time()
        self.seconds: Counter = Counter()
        self.cpu: Counter = Counter()

    def __call__(self, step: str):
        now = time.perf_counter(), time.process_time()
        self.seconds[step] = now[0] - self.last[0]
        self.cpu[step] = now[1] - self.last[1]
        self.last = now


def build(case: Case, options, layers: int | None):
    """Return the config, the layout, the function to compile and its arguments."""
    trains = case.task == "train"
    mesh = ahead.mesh_of(case.topology, case.mesh)
    layout = Layout(mesh, fsdp=trains, by_tokens=trains)
    config = ahead.config_of(case.model, layers, options.vocabulary)
    format = None if options.weights == "bfloat16" else options.weights
    rank = options.rank if trains else None
    model = ahead.abstract_model(config, layout, format, rank)
    if trains:
        made = ahead.training(model, layout, case.batch, case.length)
    else:
        new = case.length if case.task == "prefill" else 1
        made = ahead.serving(model, layout, case.batch, case.length, new)
    return config, layout, *made


def measure(case: Case, options) -> dict:
    config, layout, fn, args = build(case, options, options.layers)
    clock = Clock()
    out = dict(
        case=case.name,
        weights=options.weights,
        layers=config.layers,
        batch=case.batch,
        length=case.length,
        mesh=case.mesh,
        memory=ahead.MEMORY[case.topology.split(":")[0]],
    )
    name = f"{case.name}-{options.weights}-{config.layers}".replace(":", "_")
    folder = options.text / name
    # `Compiled.as_text` fails for some programs, so the compiler dumps the text.
    dump = dict(xla_dump_to=str(folder), xla_dump_hlo_as_text=True)
    try:
        program = ahead.compile_ahead(fn, args, layout, clock, **dump)
    except jax.errors.JaxRuntimeError as error:
        return out | dict(fits=False, needs=ahead.needed(error))
    memory = program.memory_analysis()
    arguments = memory.argument_size_in_bytes / GIB
    results = (memory.output_size_in_bytes - memory.alias_size_in_bytes) / GIB
    temporaries = memory.temp_size_in_bytes / GIB
    (path,) = folder.glob("*.jit_call.*after_codegen.txt")
    text = path.read_text()
    parsed = Program(text)
    count, moved = parsed.collectives()
    out |= dict(
        fits=True,
        needs=arguments + results + temporaries,
        arguments=arguments,
        temporaries=temporaries,
        results=results,
        kernels=parsed.kernels(),
        decoded=decoded_on_devices(text, args),
        collectives=count,
        moved={f"{kind} {dtype}": n / GIB for (kind, dtype), n in moved.items()},
        traffic=traffic(case, parsed, args),
        seconds=sum(clock.seconds.values()),
        cpu=sum(clock.cpu.values()),
        steps=clock.cpu,
    )
    return out | dict(largest=largest(case, options, out))


def traffic(case: Case, program: Program, args: tuple) -> dict | None:
    """Return the GiB that a decode step reads and writes in HBM, and the GiB of the
    cache and the weights that it multiplies."""
    if case.task != "decode":
        return None
    by_kind = program.memory_traffic()
    cache, model, *_ = args
    if model.head is not None:  # A step reads only rows of the embedding.
        model = eqx.tree_at(lambda m: m.embedding, model, None)
    return dict(
        moved=sum(by_kind.values()) / GIB,
        needed=ahead.bytes_of((cache, model)) / GIB,
        by_kind={kind: n / GIB for kind, n in by_kind.most_common(5)},
    )


def _ratio(row: dict) -> str:
    found = row["traffic"]
    return f"{found['moved'] / found['needed']:.3f}" if found else ""


def largest(case: Case, options, measured: dict) -> dict:
    """Return the most layers of this width that fit, and that model's parameters.

    A layer takes the memory of its arguments and, in training, of its saved input. Both
    are computed without compiling.
    """
    args_1, args_2 = (build(case, options, layers)[-1] for layers in (1, 2))
    layer = (ahead.bytes_of(args_2) - ahead.bytes_of(args_1)) / GIB
    if case.task == "train":
        size = ahead.MODELS[case.model][0]
        saved = 2 * case.batch * case.length * size / math.prod(case.mesh)
        layer += saved / GIB
    free = measured["memory"] - measured["needs"]
    layers = measured["layers"] + int(free // layer)
    config = ahead.config_of(case.model, layers, options.vocabulary)
    return dict(layers=layers, billions=ahead.parameters_of(config) / 1e9)


def described(row: dict) -> str:
    """Format a row as text."""
    lines = [
        f"{row['case']}, {row['weights']}, {row['layers']} layers, batch "
        f"{row['batch']} x {row['length']}, mesh {tuple(row['mesh'])}"
    ]
    fits = "fits" if row["fits"] else "does not fit"
    where = f"  {row['needs']:.2f} GiB of {row['memory']} on each device: {fits}"
    if not row["fits"]:
        return "\n".join([*lines, where])
    moved = (f"{kind} {n:.4f}" for kind, n in sorted(row["moved"].items()))
    lines += [
        where + f" ({row['arguments']:.2f} arguments, {row['temporaries']:.2f} "
        f"temporaries, {row['results']:.2f} results)",
        "  kernels: " + _listed(row["kernels"]),
        "  collectives: " + _listed(row["collectives"]),
        "  GiB moved: " + (", ".join(moved) or "none"),
        *_traffic_lines(row["traffic"]),
        "  weights in floating point: " + ("; ".join(row["decoded"]) or "none"),
        f"  compiled in {row['seconds']:.0f} s, {row['cpu']:.0f} s of CPU: "
        + ", ".join(f"{step} {n:.0f}" for step, n in row["steps"].items()),
        f"  largest model of this width: {row['largest']['layers']} layers, "
        f"{row['largest']['billions']:.0f} billion parameters",
    ]
    return "\n".join(lines)


def _traffic_lines(found: dict | None) -> list[str]:
    if not found:
        return []
    ratio = found["moved"] / found["needed"]
    kinds = ", ".join(f"{kind} {n:.3f}" for kind, n in found["by_kind"].items())
    return [
        f"  GiB in HBM: {found['moved']:.3f} read and written, {ratio:.3f} of "
        f"{found['needed']:.3f} of cache and weights ({kinds})"
    ]


HEAD = ["case", "mesh", "weights", "GiB of arguments", "GiB of temporaries"]
HEAD += ["GiB available", "kernels", "HBM", "moved", "largest, billions", "CPU s"]


def table_row(row: dict) -> list[str]:
    """Format a row of the Markdown table."""
    mesh = "x".join(map(str, row["mesh"]))
    start = [row["case"], mesh, row["weights"]]
    if not row["fits"]:
        needs = f"does not fit: {row['needs']:.2f}"
        return [*start, needs, "", f"{row['memory']:.2f}", *[""] * 5]
    moved: Counter = Counter()
    for kind, size in row["moved"].items():
        moved[kind.split()[0]] += size
    sizes = (f"{kind} {_size(size)}" for kind, size in sorted(moved.items()))
    return [
        *start,
        f"{row['arguments']:.2f}",
        f"{row['temporaries']:.2f}",
        f"{row['memory']:.2f}",
        str(sum(row["kernels"].values())),
        _ratio(row),
        ", ".join(sizes) or "none",
        f"{row['largest']['billions']:,.0f}",
        f"{row['cpu']:.0f}",
    ]


def _size(gib: float) -> str:
    return f"{gib:.0f} GiB" if gib >= 1 else f"{gib * 1024:.0f} MiB"


def largest_of_each(rows: list[dict]) -> list[str]:
    """List the largest model that fits each topology."""
    best: dict = {}
    for row in rows:
        if row["fits"]:
            key = row["case"].split("-")[-1], row["case"].split("-")[1], row["weights"]
            new = row["largest"]["billions"], row["case"].split("-")[0]
            best[key] = max(best.get(key, new), new)
    return [
        f"{topology}, {task}, {weights}: {size:.0f} billion weights, as wide as {model}"
        for (topology, task, weights), (size, model) in sorted(best.items())
    ]


def _listed(counts: dict) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(counts.items())) or "none"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="parts of names (default: all cases)")
    parser.add_argument("--layers", type=int, help="compile this many layers")
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--weights", default="nf4", help="a format, or bfloat16")
    parser.add_argument("--rank", type=int, default=16, help="rank of LoRA adapters")
    parser.add_argument("--text", type=pathlib.Path, help="a folder for HLO dumps")
    parser.add_argument("--json", type=pathlib.Path, help="a file to append rows to")
    add_output_options(parser)
    options = parser.parse_args()
    parts = options.cases or [""]
    rows = []
    with tempfile.TemporaryDirectory() as folder, output(options):
        options.text = options.text or pathlib.Path(folder)
        for case in CASES:
            if any(part in case.name for part in parts):
                row = measure(case, options)
                rows.append(row)
                if not options.markdown:
                    print(described(row), flush=True)
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps(row) + "\n")
        if options.markdown:
            print_table([HEAD, *map(table_row, rows)], markdown=True)
            return
        print("The largest model that fits:", *largest_of_each(rows), sep="\n  ")


if __name__ == "__main__":
    main()
