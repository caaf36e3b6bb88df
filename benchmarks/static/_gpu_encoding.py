"""Estimate how long quantization takes on a GPU, relative to a copy of the weight.

The estimate adds up the kernels that XLA compiles.
"""

import functools as ft
import re

import eqquant
import jax
from _gpu_bytes import steps
from _gpu_times import elementwise_time, pause
from _gpu_units import launched, units_of
from eqquant._jax import gpus
from eqquant.debug import compile_for_gpu


HEAD = "chip", "K x N", "format", "kernels", "MB", "x minimum", "temp MiB", "limit"
HEAD = *HEAD, "vs copy"
WIDTHS = 8, 12, 8, 8, 9, 9, 9, 7, 9


def row(format, name: str, size: str, dtype: str, chip: str) -> list:
    k, n = map(int, size.split("x"))
    quantize = ft.partial(eqquant.quantize, format=format, check_finite=False)
    weight = jax.ShapeDtypeStruct((n, k), dtype)
    out = jax.eval_shape(quantize, weight)
    program = compile_for_gpu(quantize, weight, chip=chip)
    read = k * n * weight.dtype.itemsize
    written = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(out))
    kernels = {kernel.name: kernel for kernel in program.kernels}
    seconds, limits, kernel_steps = 0.0, {}, steps(program.as_text())
    for step in kernel_steps:
        kernel = kernels.get(re.sub(r"\W", "_", step.name))
        launch = launched(program, kernel.name) if kernel else None
        units = units_of(kernel, 1 / (launch[0] * launch[1])) if launch else None
        time, limit = elementwise_time(step, units, gpus[chip])
        seconds += time
        limits[limit] = limits.get(limit, 0.0) + time
    moved = sum(step.bytes * step.count for step in kernel_steps)
    memory = program.compiled.memory_analysis()
    assert memory is not None
    copied = 2 * read / gpus[chip].bandwidth + pause
    return [
        *(chip, size, name),
        sum(step.count for step in kernel_steps),
        f"{moved / 1e6:.1f}",
        f"{moved / (read + written):.1f}",
        f"{memory.temp_size_in_bytes / 2**20:.1f}",
        max(limits, key=lambda limit: limits[limit]),
        f"{copied / seconds:.0%}",
    ]
