"""Train a small language model in low precision, and compare its final loss.

    python benchmarks/low_precision.py --steps 1500 --folder runs --plot loss.png

The model, the data and their order are those of `examples/llama/train_small.py`. A seed
determines the first weights and the order of the rows, so all rows of the table start
from the same weights for one seed. "bits per character" is the mean over seeds of the
loss on held-out text, computed in float32 with the trained weights. "difference" is the
mean difference to float32 with the same seed, with its standard error and its range
over seeds. Results are stored in `--folder`: a repeated command continues where an
interrupted one stopped. `--table` prints the stored results only. `--vmap` trains all
seeds of a row in one program.
"""

import argparse
import importlib
import itertools
import json
import pathlib
import statistics
import sys
import time
from typing import Literal, NamedTuple

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
from _tables import add_output_options, output, print_table
from _timing import machine


matplotlib.use("Agg")
import matplotlib.pyplot as plt


sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples" / "llama"))
train_small = importlib.import_module("train_small")
precision = importlib.import_module("precision")


class Row(NamedTuple):
    """The preset of products, whether gradients are rounded stochastically, and the
    format of optimiser states; None for float32."""

    preset: str | None = None
    stochastic: bool = False
    states: Literal["fp8", "fp4"] | None = None


PRODUCTS = {
    "float32": Row(),
    "int8": Row("int8"),
    "int8, stochastic": Row("int8", True),
    "fp8": Row("fp8"),
    "mxfp8": Row("mxfp8"),
    "nvfp4": Row("nvfp4", True),
}
STATES: dict[int, Literal["fp8", "fp4"] | None] = {32: None, 8: "fp8", 4: "fp4"}
ROWS = {
    (name, bits): row._replace(states=states)
    for bits, states in STATES.items()
    for name, row in PRODUCTS.items()
}
BASELINE = "float32", 32


class Result(NamedTuple):
    """A finished run: the loss on held-out text in bits per character, and seconds of
    CPU."""

    bits: float
    seconds: float


def recipe_of(row: Row) -> eqquant.training.Recipe | None:
    return precision.recipe_of(row.preset, row.stochastic) if row.preset else None


def path_of(folder: pathlib.Path, key: tuple[str, int], seed: int, steps: int):
    name = f"{key[0].replace(', ', '-')}-states{key[1]}-seed{seed}-steps{steps}"
    return folder / f"{name}.json"


def data() -> tuple:
    """Return rows to train on, held-out rows, and the characters of held-out text."""
    texts, held_out = train_small.read_documents()
    tokenizer = train_small.train_tokenizer(texts, train_small.CONFIG.vocabulary)
    packed = lambda texts: train_small.pack(
        train_small.encode(tokenizer, texts), train_small.LENGTH
    )
    return packed(texts), packed(held_out), sum(map(len, held_out))


def run(row: Row, seed: int, steps: int, path: pathlib.Path, data: tuple) -> Result:
    rows, held_out, characters = data
    recipe = recipe_of(row)
    begin, checkpoint = time.process_time(), path.with_suffix(".eqx")
    model, _ = train_small.train(
        rows, train_small.CONFIG, steps, checkpoint, recipe, row.states, seed
    )
    seconds = time.process_time() - begin
    bits = train_small.bits(model, held_out) / characters
    checkpoint.unlink(missing_ok=True)
    return Result(bits, seconds)


def run_together(row: Row, seeds: list[int], steps: int, data: tuple) -> list[Result]:
    """Train one model per seed, in one program."""
    rows, held_out, characters = data
    recipe = recipe_of(row)
    init, step = train_small.make_step(train_small.CONFIG, steps, recipe, row.states)
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    begin = time.process_time()
    model, state = eqx.filter_vmap(init)(keys)
    step = eqx.filter_jit(eqx.filter_vmap(step), donate="all-except-first")
    stack = lambda *leaves: jnp.stack(leaves)
    for i in range(steps):
        batches = [train_small.numbered_batch(rows, i, seed) for seed in seeds]
        model, state, _ = step(jax.tree.map(stack, *batches), model, state)
    jax.block_until_ready(model)
    seconds = (time.process_time() - begin) / len(seeds)
    model = eqquant.training.master_weights(model)
    results = []
    for index in range(len(seeds)):
        take = lambda x, index=index: x[index] if eqx.is_array(x) else x
        trained = jax.tree.map(take, model)
        bits = train_small.bits(trained, held_out) / characters
        results.append(Result(bits, seconds))
    return results


def train_all(options: argparse.Namespace, keys: list[tuple[str, int]]) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    # Seeds share a program.
    jax.config.update("jax_compilation_cache_dir", str(options.folder / "programs"))
    groups = [options.seeds] if options.vmap else [[seed] for seed in options.seeds]
    known = None
    for seeds, key in itertools.product(groups, keys):
        paths = [path_of(options.folder, key, seed, options.steps) for seed in seeds]
        if all(path.exists() for path in paths):
            continue
        known = data() if known is None else known
        if options.vmap:
            results = run_together(ROWS[key], seeds, options.steps, known)
        else:
            results = [run(ROWS[key], seeds[0], options.steps, paths[0], known)]
        for path, result in zip(paths, results, strict=True):
            path.write_text(json.dumps(result._asdict()))
            print(f"{path.stem}: {result.bits:.4f}", file=sys.stderr, flush=True)
        jax.clear_caches()


def stored(options: argparse.Namespace, key: tuple[str, int]) -> dict[int, Result]:
    """Return the finished runs of a row, by seed."""
    paths = {s: path_of(options.folder, key, s, options.steps) for s in options.seeds}
    return {
        seed: Result(**json.loads(path.read_text()))
        for seed, path in paths.items()
        if path.exists()
    }


def differences(runs: dict[int, Result], exact: dict[int, Result]) -> list[float]:
    """Return the differences in bits to the runs in float32 with the same seeds."""
    return [run.bits - exact[seed].bits for seed, run in runs.items() if seed in exact]


def standard_error(losses: list[float]) -> float:
    """Return the standard error of the mean; zero for one value."""
    return statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else 0.0


def cells_of(key: tuple[str, int], runs: dict[int, Result], exact: dict[int, Result]):
    head = (
        key[0],
        str(key[1]),
        str(len(runs)),
        f"{_mean(r.bits for r in runs.values()):.4f}",
    )
    losses = differences(runs, exact)
    if key == BASELINE or not losses:
        return *head, "", ""
    difference = f"{_mean(losses):+.4f} ± {standard_error(losses):.4f}"
    return *head, difference, f"{min(losses):+.4f} to {max(losses):+.4f}"


def _mean(values) -> float:
    return statistics.fmean(values)


def plot(found: dict, path: pathlib.Path) -> None:
    """Plot each row's differences to float32, and their means with standard errors."""
    exact = found[BASELINE]
    rows = {key: differences(runs, exact) for key, runs in found.items()}
    rows = {key: losses for key, losses in rows.items() if losses and key != BASELINE}
    size = 6.4, 0.9 + 0.24 * len(rows)
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    for place, losses in enumerate(rows.values()):
        axis.plot(losses, [place] * len(losses), "o", color="0.75", markersize=3)
        error = standard_error(losses)
        axis.errorbar(_mean(losses), place, xerr=error, fmt="o", color="C0", capsize=3)
    axis.set_yticks(range(len(rows)), [f"{x}, {bits}-bit states" for x, bits in rows])
    axis.invert_yaxis()
    axis.axvline(0, color="k", linewidth=0.8)
    axis.set_xlabel("Difference to float32, bits per character")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    parser.add_argument(
        "--states", type=int, nargs="+", choices=STATES, default=[*STATES]
    )
    parser.add_argument("--folder", type=pathlib.Path, default="low-precision-runs")
    parser.add_argument("--vmap", action="store_true", help="train seeds together")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--plot", type=pathlib.Path, help="write a plot to this file")
    add_output_options(parser)
    options = parser.parse_args()
    keys = [key for key in ROWS if key[0] in options.rows and key[1] in options.states]
    if not options.table:
        train_all(options, keys)
    found = {key: runs for key in ROWS if (runs := stored(options, key))}
    if BASELINE not in found:
        parser.error("no run of float32 is stored: include float32 with 32-bit states")
    with output(options):
        print(f"{machine()}; {options.steps} steps\n")
        head = "products", "bits of states", "seeds", "bits per character"
        table = [[*head, "difference", "range"]]
        table += [list(cells_of(k, runs, found[BASELINE])) for k, runs in found.items()]
        print_table(table, options.markdown)
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
