"""Split the time of a product with one row into its call, its kernel and its threads.

    python benchmarks/call.py
    python benchmarks/call.py --formats nf4 --sizes 1024 --markdown

Columns, in microseconds (the median over rounds):

- "product": a jitted call of one product, from Python and back.
- "call": of this, all but the kernel: the difference between "product" and "kernel".
  With several threads, it contains the time to wake threads that sleep.
- "kernel": one product in a program that multiplies with `--products` weights, one
  after the other.
- "one core": the same in a process with one core.
- "threads": the difference between "kernel" and "one core" over the number of cores. It
  is the time to wake the other threads, to wait for them, and for memory that they
  share. It is empty where one core takes no longer, because the product is too small
  for several threads.

"empty" is a jitted call that adds two numbers.
"""

import argparse
import json
import os
import subprocess
import sys

from _interleaved import interleaved
from _tables import add_output_options, output, print_table


# JAX is imported in functions: when it starts, it counts the cores that it may use.


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Return times by format and size, and of an empty call, in microseconds."""
    import eqquant
    import jax
    from _timing import median

    found = {}
    for format in options.formats:
        for size in options.sizes:
            x = jax.random.normal(jax.random.key(0), (1, size))
            weights = [
                eqquant.quantize(
                    jax.random.normal(key, (size, size)) / size**0.5, format
                )
                for key in jax.random.split(jax.random.key(1), options.products)
            ]
            # Only calls of one size alternate, because others empty the caches.
            calls = {
                "empty": _call(lambda x: x + x, jax.numpy.ones(())),
                f"{format} {size} product": _call(_chain, x, weights[:1]),
                f"{format} {size} kernel": _call(_chain, x, weights),
            }
            times = interleaved(calls, seconds=options.seconds)
            for name, runs in times.items():
                found.setdefault(name, 1e6 * median(runs))
    return found


def _chain(x, weights):
    for w in weights:
        x = x @ w.T
    return x


def _call(program, *arguments):
    import jax

    program = jax.jit(program)
    return lambda: jax.block_until_ready(program(*arguments))


def on_one_core(arguments: list[str]) -> dict[str, float]:
    """Return the times of a process that may use one core."""
    core = min(os.sched_getaffinity(0))
    ran = subprocess.run(
        [sys.executable, __file__, *arguments, "--core", str(core)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["nf4", "int8"])
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[256, 384, 1024, 4096],
        help="rows and columns of square weights",
    )
    parser.add_argument("--products", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2, help="per size")
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    add_output_options(parser)
    options = parser.parse_args()
    if options.core is not None:
        os.sched_setaffinity(0, [options.core])
        print(json.dumps(measure(options)))
        return
    cores = len(os.sched_getaffinity(0))
    one = on_one_core(sys.argv[1:])
    times = measure(options)
    table = [["format", "weight", "product", "call", "kernel", "one core", "threads"]]
    for format in options.formats:
        for size in options.sizes:
            product = times[f"{format} {size} product"]
            kernel = times[f"{format} {size} kernel"] / options.products
            alone = one[f"{format} {size} kernel"] / options.products
            values = product, product - kernel, kernel, alone
            is_shared = kernel < 0.95 * alone
            threads = f"{kernel - alone / cores:.1f}" if is_shared else ""
            cells = format, f"{size}x{size}", *(f"{x:.1f}" for x in values), threads
            table.append(list(cells))
    with output(options):
        from _timing import machine

        print(f"{machine()}, {cores} cores; empty call: {times['empty']:.1f} us\n")
        print_table(table, options.markdown)


if __name__ == "__main__":
    main()
