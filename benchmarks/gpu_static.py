"""What products with quantized weights cost on a GPU, without one.

    python benchmarks/gpu_static.py
    python benchmarks/gpu_static.py --chip a100 --m 1 --sizes 4096x4096 --markdown

Needs the compiler: `pip install 'eqquant[gpu-compiler]'`, and `JAX_PLATFORMS=cpu`.
Nothing is run. For each product, by XLA's lowering for every platform ("loop"), by that
for GPUs, and dequantizing first ("dense first"):

- kernels that are started, those in loops as often as these turn;
- megabytes that they read and write, and how many times that is what has to be moved at
  least (codes, scales, activation, result, once each);
- the memory that the program needs meanwhile;
- for a kernel without a loop, instructions for each weight, and what share of the
  bandwidth of the memory it can use at most if every cycle issues one.

On a GPU, XLA tries several tilings for a product, and the kernels of cuBLAS, and keeps
the fastest; without one it takes its first. So nothing is said of their speed.
"""

import argparse
import functools as ft
import re

import eqquant
import jax
import jax.numpy as jnp
from _gpu_bytes import cost
from eqquant._jax import gpus
from eqquant.debug import compile_for_gpu
from eqquant.kernels import gpu, xla
from eqquant.primitives import dot_by


FORMATS = {
    "int8": eqquant.Int8(),
    "w8a8": eqquant.Int8(activations="int8"),
    "nf4": eqquant.NF4(),
    "ternary": eqquant.Ternary(),
    "binary": eqquant.Binary(),
}


def by(kernel):
    def product(x, q):
        return dot_by(kernel)(
            x,
            q.codes,
            q.scales,
            format=q.format,
            contract_rows=False,
            precision=q.format.precision,
            weight_dtype=q.dtype,
            out_dtype=x.dtype,
        )

    return product


PRODUCTS = {
    "loop": by(xla),
    "for GPUs": by(gpu),
    "dense first": lambda x, q: x @ q.dequantize().T,
}


def per_weight(program, weights: int) -> float | None:
    """Instructions, of the kernel that has most, if it has no loop."""
    pattern = r"\] (\S+) grid: \[(\d+).*?threads: \[(\d+)"
    launched = {
        name: int(blocks) * int(threads)
        for name, blocks, threads in re.findall(pattern, program.launches)
    }
    issued = 0
    for kernel in program.kernels:
        if kernel.loops:
            return None
        names = [x for x in kernel.instructions if x != "NOP"]
        issued = max(issued, len(names) * launched.get(kernel.name, 0))
    return issued / weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", default="h100", choices=gpus)
    parser.add_argument("--m", type=int, nargs="+", default=[1, 16, 2048])
    parser.add_argument("--sizes", nargs="+", default=["4096x14336"], help="KxN")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--products", nargs="+", default=list(PRODUCTS))
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    chip = gpus[options.chip]
    head = "K x N", "M", "format", "product", "kernels", "MB", "x least", "MiB held"
    head = *head, "instr./weight", "of bandwidth"
    line = "| {} |" if options.markdown else "{}"
    join = " | ".join if options.markdown else "  ".join
    widths = 12, 5, 8, 12, 8, 9, 8, 9, 14, 13
    show = lambda cells: print(
        line.format(join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))),
        flush=True,
    )
    show(head)
    if options.markdown:
        show(["---"] * len(head))
    for size in options.sizes:
        k, n = map(int, size.split("x"))
        for m in options.m:
            for name in options.formats:
                q = jax.eval_shape(
                    ft.partial(
                        eqquant.quantize, format=FORMATS[name], check_finite=False
                    ),
                    jax.ShapeDtypeStruct((n, k), jnp.bfloat16),
                )
                x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
                stored = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(q))
                least = stored + 2 * m * (k + n)
                for product in options.products:
                    program = compile_for_gpu(
                        PRODUCTS[product], x, q, chip=options.chip
                    )
                    total = cost(program.as_text())
                    memory = program.compiled.memory_analysis()
                    issued = per_weight(program, n * k) if m <= 4 else None
                    share = ""
                    if issued is not None and product == "for GPUs":
                        # Four warps a cycle, of 32 weights each.
                        rate = chip.cores * chip.clock * 4 * 32 / issued
                        share = f"{rate * stored / (n * k) / chip.bandwidth:.0%}"
                    show(
                        [
                            size,
                            m,
                            name,
                            product,
                            total.launches,
                            f"{total.bytes / 1e6:.1f}",
                            f"{total.bytes / least:.1f}",
                            f"{memory.temp_size_in_bytes / 2**20:.1f}",
                            f"{issued:.1f}" if share else "",
                            share,
                        ]
                    )


if __name__ == "__main__":
    main()
