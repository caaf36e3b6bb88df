"""Measure the bounds on rows in the table that chooses native CPU kernels.

    python benchmarks/tune_cpu.py
    python benchmarks/tune_cpu.py --rules 36 37 --shapes 2048x2048 --clock cpu

`eqquant kernels` prints the table. For each rule with a bound on `m`, the script finds
a format and a shape for which the kernel changes at the bound, and times both kernels
for more and fewer rows. It prints the rule with the measured bound, and the speed of
its kernel at the current bound, relative to the other kernel.

A bound that is measured for one format and shape is a suggestion. Check a change with
`benchmarks/sweep.py`.
"""

import argparse
import functools as ft
import itertools
import time

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
from _timing import interleaved, machine
from eqquant.kernels import choose, Compute, cpu, Matmul, xla


FORMATS = (
    eqquant.NF4(),
    eqquant.Int8(),
    eqquant.Int8(block_size=128),
    eqquant.Int4(),
    eqquant.Int4(block_size=None),
    eqquant.Int3(block_size=None),
    eqquant.Int3(),
    eqquant.Ternary(),
    eqquant.Binary(),
    eqquant.FP8(),
    eqquant.FP8(block_size=64),
    eqquant.NVFP4(),
    eqquant.NF4(block_size=24),
    eqquant.NF4(block_size=48),
)
SHAPES = "1024x1024 256x256 384x384 256x1024 4096x2048"
# Tested numbers of rows, relative to the current bound.
STEPS = (1 / 8, 1 / 4, 1 / 2, 0.7, 0.85, 1, 1.2, 1.4, 2, 4, 8)
MOST_ROWS = 8192
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


@ft.cache
def described(format, rows, size):
    w = jax.ShapeDtypeStruct((rows, size), jnp.dtype("float32"))
    return jax.eval_shape(lambda w: eqquant.quantize(w, format), w)


class Case:
    """A format, a shape and a precision, with any number of rows of the activation."""

    def __init__(self, format, shape, contract_rows, precision, dtype):
        self.rows, self.size = map(int, shape.split("x"))
        self.format, self.dtype = format, dtype
        self.matmul = Matmul(format, contract_rows, Compute(precision), dtype)

    def __str__(self):
        how = self.matmul.compute.precision
        return f"{self.format}, {self.rows}x{self.size}, {how!r}, {self.dtype}"

    @ft.cached_property
    def weight(self):
        w = jax.random.normal(jax.random.key(0), (self.rows, self.size))
        return jax.jit(lambda w: eqquant.quantize(w, self.format))(w)

    @property
    def columns(self):
        is_x_w = self.matmul.contract_rows
        return self.rows if is_x_w else self.format.padded(self.size)

    def product(self, m):
        x = jax.ShapeDtypeStruct((m, self.columns), jnp.dtype(self.dtype))
        q = described(self.format, self.rows, self.size)
        return self.matmul.of(x, q.codes, q.scales)

    def rule(self, m, have):
        return cpu.rule_of(self.product(m), have)

    def call(self, rule, m, have):
        """Return the product by the kernel of a rule, as a function without
        arguments."""
        x = np.random.default_rng(m).standard_normal((m, self.columns), np.float32)
        x, product = jnp.asarray(x, self.dtype), self.product(m)
        kernel = choose(xla.KERNELS, product)
        if rule.kernel != "XLA":
            name = rule.kernel, rule.instructions(have)
            (kernel,) = (
                k for k in cpu.KERNELS if (k.arithmetic, k.instructions) == name
            )
        run = jax.jit(lambda x, w: kernel.lower(product, x, w.codes, w.scales))
        return ft.partial(run, x, self.weight)


def find_case(rule, bound, shapes, have):
    """Return a case in which the rule holds on one side of a bound only, and the rules
    on both sides; or None."""
    ways = itertools.product(
        FORMATS, shapes, (False, True), ("high", "default"), ("float32", "bfloat16")
    )
    for way in ways:
        case = Case(*way)
        if cpu.why_unsupported(case.product(bound)):
            continue
        sides = [case.rule(m, have) for m in (bound, bound + 1, bound - 1) if m]
        others = [other for other in sides if other.kernel != rule.kernel]
        if rule in sides and others:
            return case, others[0]
    return None


def measure(case, rule, other, points, options, have):
    """Return the first of some numbers of rows from which the kernel of the rule is the
    faster one, or the slower one if the bound is an upper bound; and all speeds."""
    speeds = {}

    def speed(m):
        if m not in speeds:
            calls = {r.number: case.call(r, m, have) for r in (rule, other)}
            times = interleaved(
                calls, seconds=options.seconds, clock=CLOCKS[options.clock]
            )
            least = {number: min(runs) for number, runs in times.items()}
            speeds[m] = least[other.number] / least[rule.number]
        return speeds[m]

    is_lower = _bound(rule).relation[0] == ">"
    first, last = 0, len(points)
    while first < last:  # The answer is `points[first]`, or larger than all points.
        middle = (first + last) // 2
        if (speed(points[middle]) > 1) == is_lower:
            last = middle
        else:
            first = middle + 1
    return first, speed


def _bound(rule):
    return next((c for c in rule.conditions if c.fact == "m"), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rules", type=int, nargs="+", help="numbers of rules")
    parser.add_argument("--shapes", nargs="+", default=SHAPES.split())
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--seconds", type=float, default=0.15, help="for each point")
    options = parser.parse_args()
    library = cpu.load()
    if isinstance(library, str):
        raise SystemExit(library)
    have = cpu.cpu_of(library)
    print(f"{machine()}; {cpu.status()}")
    for rule in cpu.RULES:
        bound = _bound(rule)
        asked = options.rules is None or rule.number in options.rules
        if not asked or bound is None or not rule.runs_on(have):
            continue
        found = find_case(rule, bound.bound, options.shapes, have)
        if found is None:
            print(f"{rule.number:2} {rule.kernel}: no product of this script uses it")
            continue
        case, other = found
        rows = {max(1, round(bound.bound * step)) for step in STEPS}
        points = sorted(m for m in rows if m <= MOST_ROWS)
        first, speed = measure(case, rule, other, points, options, have)
        value = f"m{bound.relation}{points[min(first, len(points) - 1)]}"
        value += " or more" * (first == len(points))
        now = speed(min(bound.bound, MOST_ROWS))
        print(f"{rule.number:2} {rule.kernel} over {other.kernel}: {bound} -> {value}")
        print(
            f"   {now:.2f} times as fast for {bound.bound} rows of {case}", flush=True
        )


if __name__ == "__main__":
    main()
