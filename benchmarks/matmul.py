"""Time quantized matmuls against the dense float32 matmul in the same run.

    python benchmarks/matmul.py
    python benchmarks/matmul.py --formats nf4 --m 1 8 --transposed
    python benchmarks/matmul.py --formats nf4 --m 1 --ring 1.1
    python benchmarks/matmul.py --csv matmul.csv

- "M=N": the time of the dense float32 matmul over this time; above 1 is faster than
  dense. The first ratio compares medians. The second compares the fastest runs, which
  other work on the machine affects less.
- "error": relative to the float64 matmul with the dequantized weight.
- "MB": temporary memory.

With `--ring`, calls rotate through copies of the weight that exceed every cache. The
row "copy" times two threads that each copy half of the codes and scales. It is an upper
bound for the speed of one row, which is limited by memory.
"""

import argparse
import concurrent.futures
import csv
import itertools
from collections.abc import Iterator

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
from _tables import add_output_options, format_row, output, print_head
from _timing import interleaved, machine, median
from jax import lax


FORMATS = ("int8", "nf4", "ternary", "binary")
PRECISIONS = ("highest", "high", "default")


def dense(x, w):
    # The weight is the left operand, because XLA:CPU is slow at `x @ w.T` with one row.
    return lax.dot_general(w, x, (((1,), (1,)), ((), ()))).T


def dense_transposed(x, w):
    return x @ w


def product(x, q):
    return x @ q.T


def product_transposed(x, q):
    return x @ q


def dequantize_then_dot(x, q):
    return dense(x, q.dequantize())


def ring(weight, gigabytes: float):
    """Cycle through copies of a weight with `gigabytes` GB in total."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
    copies = max(1, round(gigabytes * 1e9 / size))
    others = (jax.tree.map(jnp.copy, weight) for _ in range(copies - 1))
    return itertools.cycle([weight, *others])


class Copy:
    """A call that copies the leaves of the next weight into a fixed buffer."""

    def __init__(self, weights):
        self.weights, self.to = weights, {}
        self.threads = concurrent.futures.ThreadPoolExecutor(2)

    def __call__(self):
        pending = []
        for i, leaf in enumerate(jax.tree.leaves(next(self.weights))):
            leaf = np.asarray(leaf).reshape(-1)
            to = self.to.setdefault(i, np.zeros_like(leaf))
            half = leaf.size // 2
            for part in (slice(half), slice(half, None)):
                pending.append(self.threads.submit(np.copyto, to[part], leaf[part]))
        for future in pending:
            future.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096, help="rows and columns")
    parser.add_argument(
        "--m", type=int, nargs="+", default=[1, 8, 64, 512], help="rows of x"
    )
    parser.add_argument(
        "--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS
    )
    parser.add_argument(
        "--formats", nargs="+", default=FORMATS, help="names of formats"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each entry")
    parser.add_argument(
        "--transposed", action="store_true", help="compute x @ w, as gradients do"
    )
    parser.add_argument(
        "--ring",
        type=float,
        default=0.0,
        help="gigabytes of copies of each weight to rotate through",
    )
    parser.add_argument("--csv", help="a file to write the entries to")
    add_output_options(parser)
    options = parser.parse_args()

    with output(options):
        entries = measure(options)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, entries[0])
            writer.writeheader()
            writer.writerows(entries)


def measure(options: argparse.Namespace) -> list[dict]:
    """Print the table. Return one entry per format, precision and number of rows."""
    size = options.size
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.standard_normal((size, size), dtype=np.float32))
    xs = {
        m: jnp.asarray(rng.standard_normal((m, size), dtype=np.float32))
        for m in options.m
    }
    expression = "x @ w" if options.transposed else "x @ w.T"
    print(f"{machine()}; {expression} with a weight of {size} x {size}\n")
    head = ["format", "precision", "B/weight"]
    for m in options.m:
        head += [f"M={m}", "error", "MB"]
    widths = [8, 19, 8] + [13, 6, 4] * len(options.m)
    print_head(head, widths, options.markdown)
    entries = []
    for name in options.formats:
        q = eqquant.quantize(weight, name)
        cells: dict[str, list[str]] = {}
        for m in options.m:
            for entry in measure_format(weight, q, xs[m], options):
                entries.append(entry | {"format": name, "m": m})
                row = cells.setdefault(entry["precision"], [])
                row.append(f"{entry['ratio']:.2f} ({entry['ratio_of_fastest']:.2f})")
                error, megabytes = entry["error"], entry["temporary_megabytes"]
                row.append("" if error is None else f"{error:.0e}")
                row.append("" if megabytes is None else f"{megabytes:.0f}")
        for variant, row in cells.items():
            start = name, variant, f"{q.nbytes / q.size:.3f}"
            print(format_row([*start, *row], widths, options.markdown), flush=True)
    return entries


def measure_format(weight, q, x, options) -> Iterator[dict]:
    """Yield an entry for each precision of a format, and for a copy with `--ring`."""
    transposed = options.transposed
    baseline = jax.jit(dense_transposed if transposed else dense)
    quantized = jax.jit(product_transposed if transposed else product)
    variants = {
        precision: (
            quantized,
            eqquant.with_compute(q, precision=precision),
        )
        for precision in options.precisions
    }
    if not transposed:
        variants["dequantize, then dot"] = (jax.jit(dequantize_then_dot), q)
    compiled = {name: fn.lower(x, q).compile() for name, (fn, q) in variants.items()}
    rings = {name: ring(q, options.ring) for name, (_, q) in variants.items()}
    weights = ring(weight, options.ring)
    calls = {"dense": lambda: baseline(x, next(weights))}
    for name, fn in compiled.items():
        calls[name] = lambda fn=fn, weights=rings[name]: fn(x, next(weights))
    if options.ring:
        calls["copy"] = Copy(ring(q, options.ring))
    times = interleaved(calls, seconds=options.seconds * (1 + len(variants)))
    exact = np.asarray(q.dequantize(), np.float64)
    reference = np.asarray(x, np.float64) @ (exact if transposed else exact.T)
    for name in [*variants, *(["copy"] if options.ring else [])]:
        entry = {
            "format": None,
            "precision": name,
            "m": len(x),
            "ratio": median(times["dense"]) / median(times[name]),
            "ratio_of_fastest": min(times["dense"]) / min(times[name]),
            "error": None,
            "temporary_megabytes": None,
            "bytes_per_weight": q.nbytes / q.size,
        }
        if name in compiled:
            out = np.asarray(compiled[name](x, variants[name][1]))
            error = np.linalg.norm(out - reference) / np.linalg.norm(reference)
            memory = compiled[name].memory_analysis().temp_size_in_bytes
            entry |= {"error": error, "temporary_megabytes": memory / 2**20}
        yield entry


if __name__ == "__main__":
    main()
