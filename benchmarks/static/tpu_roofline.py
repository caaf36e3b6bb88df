"""Estimate the speed of the TPU kernels from the schedule that libtpu compiles.

    python benchmarks/static/tpu_roofline.py
    python benchmarks/static/tpu_roofline.py --chips v5e --m 8 --sizes 4096x4096
    python benchmarks/static/tpu_roofline.py --rows rows.jsonl --markdown
    python benchmarks/static/tpu_roofline.py --sweep  # For `kernels/tpu/_chips.py`.

The script needs libtpu, but no TPU: it compiles the kernels ahead of time and computes
their time from the schedule (see `_tpu_schedule.py`). The result is a model, not a
measurement: trust the cycles and the ranking more than the microseconds. A full run
takes about an hour. `--rows` stores finished rows in a file, so that an interrupted run
can continue.

- "step", "matrix", "transfer": cycles of one grid step for its instructions, the matrix
  units and the memory transfers. The longest of the three is the limit.
- "limit": "transfer", "matrix", or the busiest unit and its utilization.
- "roofline": the lower bound over the estimated time. The bound moves every byte once
  or multiplies at the bfloat16 peak, whichever takes longer.
- "speed": the time of "dense", a bfloat16 Pallas kernel that is compiled the same way,
  over the estimated time.
- "other us": work on the activation outside of the kernel, included in the time.

Rows with the variant "XLA" dequantize the weight and then multiply. Their time is the
compiler's own estimate, and they list the temporary memory.
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

import _paths  # noqa: F401
import eqquant
import jax
import jax.numpy as jnp
from _tables import add_output_options, output
from _tpu_schedule import DEVICES, estimate
from eqquant.debug import compile_for_tpu
from eqquant.kernels import Compute, Matmul, tpu, TPUKernel
from eqquant.primitives import dot_by
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


FORMATS = {
    "int8": eqquant.Int8(),
    "w8a8": eqquant.Int8(),
    "nf4": eqquant.NF4(),
    "nf4-exact": eqquant.NF4(),
    "fp8": eqquant.FP8(),
    "mxfp4": eqquant.MXFP4(),
    "int4": eqquant.Int4(),
    "nf3": eqquant.NF3(),
    "int6": eqquant.formats.Int6(),
    "int5": eqquant.formats.Int5(),
    "int3": eqquant.Int3(),
    "nf2": eqquant.NF2(),
    "trellis4": eqquant.formats.Trellis(bits=4),
    "trellis3": eqquant.formats.Trellis(bits=3),
    "trellis2": eqquant.formats.Trellis(bits=2),
    "int2": eqquant.Int2(),
    "ternary": eqquant.Ternary(),
    "binary": eqquant.Binary(),
}
PACKAGES = ["jax", "libtpu"]


def dense_blocks(m: int, k: int) -> tuple[int, int, int]:
    return (m, k, 512) if m <= 256 else (min(m, 2048), 1024, 1024)


def tiled(x, w, n: int, product: Callable, name: str, pallas_call=pl.pallas_call):
    """Compute `x @ w` with `n` columns tile by tile. `w` can be a tree of arrays."""
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


# The formats above with other products than their defaults.
COMPUTE = {
    "w8a8": Compute(activations="int8"),
    "nf4-exact": Compute(tpu=TPUKernel(exact_table=True)),
}


def cases(m: int, k: int, n: int, formats, xla: bool = True):
    """Yield the dense case first, then the cases with quantized weights."""
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((k, n), jnp.bfloat16)
    yield Case("dense", "", 2 * k * n, dense, (x, w))
    for name in formats:
        q = quantized(name, n, k)
        for precision in ("high", "default")[: 1 + (name == "nf4")]:
            compute = q.compute.updated(precision=precision)
            product = ft.partial(multiply, format=q.format, compute=compute)
            yield Case(name, precision, q.nbytes, product, (x, q.codes, q.scales))
        if xla:
            yield Case(name, "XLA", q.nbytes, lambda x, q: x @ q.dequantize().T, (x, q))


def quantized(name: str, n: int, k: int) -> eqquant.QuantizedArray:
    """Return an abstract quantized weight."""
    return jax.eval_shape(
        lambda: eqquant.quantize(
            jnp.zeros((n, k), jnp.bfloat16),
            FORMATS[name],
            check_finite=False,
            compute=COMPUTE.get(name),
        )
    )


def multiply(x, codes, scales, *, format, compute):
    return dot_by((tpu.KERNELS,))(
        x,
        codes,
        scales.astype(scales.dtype),  # Decodes scales that are stored in 8 bits.
        matmul=Matmul(format, False, compute, jnp.bfloat16, jnp.bfloat16),
    )


class Rows:
    """The rows computed so far, optionally stored in a file.

    A row is valid only for the version of libtpu that computed it.
    """

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
    parser.add_argument(
        "--m", type=int, nargs="+", default=[8, 16, 256, 2048], help="rows of x"
    )
    parser.add_argument(
        "--sizes", nargs="+", default=["4096x14336", "4096x4096"], help="KxN"
    )
    parser.add_argument("--no-xla", action="store_true", help="skip the XLA variants")
    parser.add_argument("--rows", type=pathlib.Path, help="a file to keep rows in")
    add_output_options(parser)
    return parser


def run(options: argparse.Namespace, cases: Callable) -> None:
    """Estimate every case of `cases(m, k, n)` and print a table."""
    with output(options):
        _print_tables(options, cases)


def _print_tables(options: argparse.Namespace, cases: Callable) -> None:
    """Print rows as they are computed, or complete tables in Markdown."""
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
                chip_cells = table.setdefault((m, case.name, case.variant), {})
                chip_cells[chip] = cell_of(row, first)
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
    return f"{row['temporary'] / 2**20:.0f} MiB of temporaries"


def cell_of(row: dict, first: dict) -> str:
    if "failed" in row:
        return "fails"
    cell = f"{row['roofline'] / row['seconds']:.0%}, "
    cell += f"{first['seconds'] / row['seconds']:.2f}"
    return f"{cell}, {row['limit']}" if row["step_cycles"] else cell


def markdown(table: dict[tuple, dict[str, str]], chips) -> str:
    head = ["M", "format", "variant", *chips]
    lines = [head, ["---"] * len(head)]
    for m, name, variant in sorted(table, key=lambda key: key[0]):
        cells = [table[m, name, variant].get(chip, "") for chip in chips]
        lines.append([str(m), name, variant, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@contextlib.contextmanager
def choosing(change: Callable):
    """Change the table of a chip inside the context.

    The table is looked up during compilation, because the chip is set only there.
    """
    chosen = tpu.chip
    tpu.chip = lambda: change(chosen())
    try:
        yield
    finally:
        tpu.chip = chosen


def with_steps(name: str, choice, chip):
    """Return a chip with another choice for few rows.

    A choice has the rows of the weight in a step, the bytes of each row that are
    decoded at once, and the way in which codes are transposed.
    """
    *step, transposed = choice
    return dataclasses.replace(
        chip,
        steps=chip.steps | {name: tuple(step)},
        transposed=chip.transposed | {name: transposed},
    )


def with_tiles(name: str, choice, chip):
    """Return a chip with another choice of (tile rows, tile columns) for many rows."""
    del name
    return dataclasses.replace(chip, tile_m=choice[0], tile_n=choice[1])


def sweep(chips, formats, k: int, n: int) -> None:
    """Print the time of every choice that the table of a chip can hold, best first."""
    steps = [*itertools.product((256, 512, 1024, 2048), (128, 256, 512), (0, 1, 2))]
    tiles = [*itertools.product((512, 1024, 2048), (256, 512, 1024))]
    for chip, name in itertools.product(chips, formats):
        q = quantized(name, n, k)
        product = ft.partial(multiply, format=q.format, compute=q.compute)
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
                    except RuntimeError:  # The choice exceeds the chip's memory.
                        continue
                times[choice] = result.seconds * 1e6
            best = sorted(times, key=times.__getitem__)
            listed = ", ".join(f"{choice}: {times[choice]:.1f}" for choice in best)
            print(f"{chip:<6} {name:<9} M={m}, us: {listed}", flush=True)


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument(
        "--sweep", action="store_true", help="compare all sizes of steps and tiles"
    )
    options = arguments.parse_args()
    if options.sweep:
        k, n = map(int, options.sizes[0].split("x"))
        sweep(options.chips, options.formats, k, n)
        return
    run(options, ft.partial(cases, formats=options.formats, xla=not options.no_xla))


if __name__ == "__main__":
    main()
