"""How close the kernels for TPUs come to the roofline, by the compiler's own schedule.

    python benchmarks/tpu_roofline.py
    python benchmarks/tpu_roofline.py --chips v5e --m 8 16 --sizes 4096x4096 --no-xla
    python benchmarks/tpu_roofline.py --rows rows.jsonl --markdown
    python benchmarks/tpu_roofline.py --sweep  # What `kernels/tpu/_chips.py` has.

Needs libtpu, but no TPU: the kernels are compiled ahead of time, and the time follows
from the schedule (see `_schedule.py`). That is a model, not a measurement: trust the
cycles and the ranking rather than the microseconds. All of it takes about an hour; with
`--rows` what was computed is kept, and not computed again, so that it can be stopped.

Cycles are of one grid step: of the instructions, of the matrix units, and of the
transfers from memory. The longest of the three decides, and is what limits the kernel:
"transfer", "matrix", or for instructions the unit that has most to do, and the share of
the cycles for which it is busy (what is missing to 100% is waiting for results, and for
units that are not equally busy). The roofline is the time to move every byte once, or
to multiply at the peak rate in bfloat16, whichever is longer. "dense" is a Pallas
kernel for bfloat16, compiled the same way; the speed is how many times as fast as that
one is. What is done to the activation before, by a kernel or by XLA, counts in the
time; "other" is that part of it. "XLA" is what the compiler makes of dequantizing
first, in the cycles that it expects itself, and the memory that it needs meanwhile.
"""

import argparse
import contextlib
import dataclasses
import functools as ft
import importlib.metadata
import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import eqquant
import jax
import jax.numpy as jnp
from _schedule import DEVICES, estimate
from eqquant.debug import compile_for_tpu
from eqquant.kernels import tpu
from eqquant.primitives import dot_by
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


FORMATS = {
    "int8": eqquant.Int8(),
    "w8a8": eqquant.Int8(activations="int8"),
    "nf4": eqquant.NF4(),
    "nf4-exact": eqquant.NF4(tpu=eqquant.kernels.TPUKernel(exact_table=True)),
    "fp8": eqquant.FP8(),
    "mxfp4": eqquant.MXFP4(),
    "int4": eqquant.Int4(),
    "nf3": eqquant.NF3(),
    "int3": eqquant.Int3(),
    "nf2": eqquant.NF2(),
    "int2": eqquant.Int2(),
    "ternary": eqquant.Ternary(),
    "binary": eqquant.Binary(),
}
PACKAGES = ["jax", "libtpu"]


def dense_blocks(m: int, k: int) -> tuple[int, int, int]:
    return (m, k, 512) if m <= 256 else (min(m, 2048), 1024, 1024)


def tiled(x, w, n: int, product: Callable, name: str, pallas_call=pl.pallas_call):
    """`x @ w` of `n` columns, by products of tiles. `w` may be a tree of arrays."""
    m, k = x.shape
    bm, bk, bn = dense_blocks(m, k)

    def kernel(x, w, out, total):
        @pl.when(pl.program_id(2) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += product(x[...], jax.tree.map(lambda ref: ref[...], w))

        @pl.when(pl.program_id(2) == k // bk - 1)
        def _():
            out[...] = total[...].astype(out.dtype)

    return pallas_call(
        kernel,
        grid=(m // bm, n // bn, k // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=2**26,
        ),
        name=name,
    )(x, w)


def dense(x, w):
    product = ft.partial(lax.dot, preferred_element_type=jnp.float32)
    return tiled(x, w, w.shape[1], product, "dense")


class Case(NamedTuple):
    name: str
    variant: str
    weight_bytes: int
    product: Callable
    args: tuple


def cases(m: int, k: int, n: int, formats, xla: bool = True):
    """The dense product first, then those with quantized weights."""
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((k, n), jnp.bfloat16)
    yield Case("dense", "", 2 * k * n, dense, (x, w))
    for name in formats:
        q = quantized(name, n, k)
        for precision in ("high", "default")[: 1 + (name == "nf4")]:
            product = ft.partial(multiply, format=q.format, precision=precision)
            yield Case(name, precision, q.nbytes, product, (x, q.codes, q.scales))
        if xla:
            yield Case(name, "XLA", q.nbytes, lambda x, q: x @ q.dequantize().T, (x, q))


def quantized(name: str, n: int, k: int) -> eqquant.QuantizedArray:
    """The shapes of a weight."""
    return jax.eval_shape(
        lambda: eqquant.quantize(
            jnp.zeros((n, k), jnp.bfloat16), FORMATS[name], check_finite=False
        )
    )


def multiply(x, codes, scales, *, format, precision):
    return dot_by(tpu)(
        x,
        codes,
        scales.astype(scales.dtype),  # Some are stored in other ways.
        format=format,
        contract_rows=False,
        precision=precision,
        weight_dtype=jnp.bfloat16,
        out_dtype=jnp.bfloat16,
    )


class Rows:
    """What was computed, by this version of the compiler, in a file if there is to be
    one."""

    def __init__(self, path: pathlib.Path | None):
        self.path = path
        lines = path.read_text().splitlines() if path and path.exists() else []
        self.known: dict[tuple, dict] = {}
        for row in map(json.loads, lines):
            self.known[self._key(row)] = row

    def _key(self, row: dict) -> tuple:
        parts = ("libtpu", "chip", "k", "n", "m", "name", "variant")
        return tuple(row.get(part) for part in parts)

    def get(self, case: Case, chip: str, m: int, k: int, n: int) -> dict[str, Any]:
        row: dict[str, Any] = dict(
            libtpu=importlib.metadata.version("libtpu"),
            chip=chip,
            k=k,
            n=n,
            m=m,
            name=case.name,
            variant=case.variant,
        )
        if self._key(row) in self.known:
            return self.known[self._key(row)]
        try:
            result = estimate(
                case.product, *case.args, chip=chip, compile=compile_for_tpu
            )
            row |= dataclasses.asdict(result)
            moved = case.weight_bytes + 2 * m * (k + n)
            row["roofline"] = DEVICES[chip].roofline(moved, m * k * n)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            row["failed"] = f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
        self.known[self._key(row)] = row
        if self.path:
            with self.path.open("a") as file:
                print(json.dumps(row), file=file)
        return row


def parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--chips", nargs="+", default=["v5e", "v6e", "v5p", "TPU7x"])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--m", type=int, nargs="+", default=[8, 16, 256, 2048])
    parser.add_argument(
        "--sizes", nargs="+", default=["4096x14336", "4096x4096"], help="KxN"
    )
    parser.add_argument("--no-xla", action="store_true", help="no rows of XLA's")
    parser.add_argument("--rows", type=pathlib.Path, help="a file that keeps them")
    parser.add_argument("--markdown", action="store_true")
    return parser


def run(options: argparse.Namespace, cases: Callable) -> None:
    """Print a table of what `cases(m, k, n)` has, row by row as it is computed; or all
    in Markdown."""
    rows = Rows(options.rows)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    print(f"{', '.join(versions)}; activations in bfloat16")
    for size in options.sizes:
        k, n = map(int, size.split("x"))
        table: dict[tuple, dict[str, str]] = {}
        failed: dict[str, None] = {}
        if not options.markdown:
            print(f"\nK={k}, N={n}\n{header()}")
        for chip, m in itertools.product(options.chips, options.m):
            first = None
            for case in cases(m, k, n):
                row = rows.get(case, chip, m, k, n)
                first = first or row
                if not options.markdown:
                    print(line_of(row, first), flush=True)
                of_chips = table.setdefault((m, case.name, case.variant), {})
                of_chips[chip] = cell_of(row, first)
                if "failed" in row:
                    failed[f"{case.name}, {case.variant}: {row['failed']}"] = None
        if options.markdown:
            print(f"\nK={k}, N={n}\n\n{markdown(table, options.chips)}", flush=True)
            print("\n" + "\n".join(failed), flush=True)


def header() -> str:
    columns = f"{'chip':<6}{'M':>5} {'':<11}{'':<10}"
    columns += f"{'step':>8}{'matrix':>8}{'transfer':>9}{'MB':>8}{'other us':>9}"
    return columns + f"{'us':>9}{'roofline':>9}{'speed':>7}  limit"


def line_of(row: dict, first: dict) -> str:
    start = f"{row['chip']:<6}{row['m']:>5} {row['name']:<11}{row['variant']:<10}"
    if "failed" in row:
        return f"{start}  {row['failed']}"
    cycles = f"{'-':>8}{'-':>8}{'-':>9}{'-':>8}{'-':>9}"
    if row["step_cycles"]:
        cycles = (
            f"{row['step_cycles']:>8.0f}{row['matrix_cycles']:>8.0f}"
            f"{row['transfer_cycles']:>9.0f}{row['bytes_moved'] / 1e6:>8.1f}"
            f"{row['other'] * 1e6:>9.1f}"
        )
    return (
        f"{start}{cycles}{row['seconds'] * 1e6:>9.1f}"
        f"{row['roofline'] / row['seconds']:>9.0%}"
        f"{first['seconds'] / row['seconds']:>7.2f}  {limit_of(row)}"
    )


def limit_of(row: dict) -> str:
    if row["step_cycles"]:
        return row["limit"]
    return f"{row['temporary'] / 2**20:.0f} MiB written between"


def cell_of(row: dict, first: dict) -> str:
    if "failed" in row:
        return "fails"
    cell = f"{row['roofline'] / row['seconds']:.0%}, "
    cell += f"{first['seconds'] / row['seconds']:.2f}"
    return f"{cell}, {row['limit']}" if row["step_cycles"] else cell


def markdown(table: dict[tuple, dict[str, str]], chips) -> str:
    head = ["M", "format", "variant", *chips]
    lines = [head, ["---"] * len(head)]
    # For one M all formats, of whichever chip has them.
    for m, name, variant in sorted(table, key=lambda key: key[0]):
        of_chips = table[m, name, variant]
        cells = [of_chips.get(chip, "") for chip in chips]
        lines.append([str(m), name, variant, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@contextlib.contextmanager
def choosing(change: Callable):
    """Meanwhile the table of a chip is changed. Which chip it is, is known only while
    something is compiled for it."""
    chosen = tpu.chip
    tpu.chip = lambda: change(chosen())
    try:
        yield
    finally:
        tpu.chip = chosen


def with_steps(name: str, choice, chip):
    """So many rows of the weight in a step, so many bytes of each at once, and whether
    codes are transposed, for few rows."""
    *step, turned = choice
    return dataclasses.replace(
        chip,
        steps=chip.steps | {name: tuple(step)},
        turned=chip.turned | {name: turned},
    )


def with_tiles(name: str, choice, chip):
    """So many rows of the activation and columns of the result in a tile, for many."""
    del name
    return dataclasses.replace(chip, tile_m=choice[0], tile_n=choice[1])


def sweep(chips, formats, k: int, n: int) -> None:
    """The times of all that the table of a chip chooses, the best first."""
    steps = [*itertools.product((256, 512, 1024, 2048), (128, 256, 512), (0, 1, 2))]
    tiles = [*itertools.product((512, 1024, 2048), (256, 512, 1024))]
    for chip, name in itertools.product(chips, formats):
        q = quantized(name, n, k)
        product = ft.partial(multiply, format=q.format, precision="high")
        blocked = [step for step in steps if step[1] == 128 and step[2] < 2]
        for m, change, choices in (
            (8, with_steps, blocked if q.block_size else steps),
            (2048, with_tiles, tiles),
        ):
            x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
            args = (product, x, q.codes, q.scales)
            times = {}
            for choice in choices:
                with choosing(ft.partial(change, q.format.name, choice)):
                    try:
                        result = estimate(*args, chip=chip, compile=compile_for_tpu)
                    except RuntimeError:  # More than the memory of the chip.
                        continue
                times[choice] = result.seconds * 1e6
            best = sorted(times, key=times.__getitem__)
            listed = ", ".join(f"{choice}: {times[choice]:.1f}" for choice in best)
            print(f"{chip:<6} {name:<9} M={m}, us: {listed}", flush=True)


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--sweep", action="store_true", help="steps and tiles")
    options = arguments.parse_args()
    if options.sweep:
        k, n = map(int, options.sizes[0].split("x"))
        sweep(options.chips, options.formats, k, n)
        return
    run(options, ft.partial(cases, formats=options.formats, xla=not options.no_xla))


if __name__ == "__main__":
    main()
