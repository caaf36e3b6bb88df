"""Products with quantized weights, against the dense product in the same run.

    python benchmarks/matmul.py
    python benchmarks/matmul.py --formats nf4 --m 1 8 --transposed
    python benchmarks/matmul.py --formats nf4 --m 1 --ring 1.1
    python benchmarks/matmul.py --csv matmul.csv

An entry is the time of the dense float32 product over the time of this one: above 1 is
faster than dense. First the ratio of the medians, then that of the fastest runs, which
other work on the machine disturbs less. The error is relative to the same product with
the dequantized weight, in float64; MB are of temporaries.

With `--ring` a row says how long it takes to copy codes and scales, half of them on
each of two threads: what a product of one row, which is bound by memory, can be held
against.
"""

import argparse
import concurrent.futures
import csv
import dataclasses
import itertools

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
from _timing import interleaved, machine, median
from jax import lax


FORMATS = ("int8", "nf4", "ternary", "binary")
PRECISIONS = ("highest", "high", "default")


def dense(x, w):
    # The weight on the left: XLA:CPU is slow at `x @ w.T` with one row.
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
    """Copies of a weight, one after the other, that together no cache holds."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
    copies = max(1, round(gigabytes * 1e9 / size))
    others = (jax.tree.map(jnp.copy, weight) for _ in range(copies - 1))
    return itertools.cycle([weight, *others])


class Copy:
    """Copies the leaves of one weight after the other to the same place."""

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
        for each in pending:
            each.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096, help="rows and columns")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument(
        "--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS
    )
    parser.add_argument("--formats", nargs="+", default=FORMATS, help="by their names")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each entry")
    parser.add_argument(
        "--transposed", action="store_true", help="contract rows, as a gradient does"
    )
    parser.add_argument(
        "--ring",
        type=float,
        default=0.0,
        help="gigabytes of copies of each weight, to take in turn",
    )
    parser.add_argument("--csv", help="a file to write the table to as well")
    options = parser.parse_args()

    size = options.size
    entries = []
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.standard_normal((size, size), dtype=np.float32))
    print(f"{machine()}; weight {size} x {size}; times as fast as dense float32")
    if options.transposed:
        print("contracting the rows: x @ w")
    heads = [f"{f'M={m}':<6} (min)  error  MB" for m in options.m]
    print(f"{'format':<9}{'precision':<21}{'B/weight':>9}  " + "  ".join(heads))
    transposed = options.transposed
    baseline = jax.jit(dense_transposed if transposed else dense)
    quantized = jax.jit(product_transposed if transposed else product)
    weights = ring(weight, options.ring)
    for name in options.formats:
        q = eqquant.quantize(weight, name)
        exact = np.asarray(q.dequantize(), np.float64)
        variants = {
            precision: (
                quantized,
                q.replace(format=dataclasses.replace(q.format, precision=precision)),
            )
            for precision in options.precisions
        }
        if not transposed:
            variants["dequantize, then dot"] = (jax.jit(dequantize_then_dot), q)
        per_weight = q.nbytes / q.size
        rows = {
            variant: f"{name:<9}{variant:<21}{per_weight:>9.3f}" for variant in variants
        }
        rings = {name: ring(q, options.ring) for name, (_, q) in variants.items()}
        copies = {"a copy of it": Copy(ring(q, options.ring))} if options.ring else {}
        rows |= {variant: f"{name:<9}{variant:<21}{'':>9}" for variant in copies}
        for m in options.m:
            x = jnp.asarray(rng.standard_normal((m, size), dtype=np.float32))
            reference = np.asarray(x, np.float64) @ (exact if transposed else exact.T)
            compiled = {
                variant: fn.lower(x, q).compile()
                for variant, (fn, q) in variants.items()
            }
            # One after the other, so that each finds its weight in no cache, as the
            # layers of a model do.
            times = interleaved(
                {"dense": lambda x=x: baseline(x, next(weights))}
                | {
                    variant: lambda x=x, ring=rings[variant], call=compiled[variant]: (
                        call(x, next(ring))
                    )
                    for variant in variants
                }
                | copies,
                seconds=options.seconds * (1 + len(variants)),
            )
            for variant in copies:
                ratio = median(times["dense"]) / median(times[variant])
                fastest = min(times["dense"]) / min(times[variant])
                rows[variant] += f"  {ratio:>5.2f} ({fastest:>5.2f}) {'':>10}"
            for variant, (_, q) in variants.items():
                ratio = median(times["dense"]) / median(times[variant])
                fastest = min(times["dense"]) / min(times[variant])
                error = np.linalg.norm(np.asarray(compiled[variant](x, q)) - reference)
                error /= np.linalg.norm(reference)
                memory = compiled[variant].memory_analysis()
                megabytes = memory.temp_size_in_bytes / 2**20
                rows[variant] += (
                    f"  {ratio:>5.2f} ({fastest:>5.2f}) {error:>6.0e} {megabytes:>3.0f}"
                )
                entries.append(
                    {
                        "format": name,
                        "precision": variant,
                        "m": m,
                        "ratio": ratio,
                        "ratio_of_fastest": fastest,
                        "error": error,
                        "temporary_megabytes": megabytes,
                        "bytes_per_weight": per_weight,
                    }
                )
        print("\n".join(rows.values()), flush=True)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, entries[0])
            writer.writeheader()
            writer.writerows(entries)


if __name__ == "__main__":
    main()
