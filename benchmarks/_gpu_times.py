"""How long the kernels of a program for a GPU take at least, one after the other.

By NVIDIA's data sheets: the memory's bandwidth, and what tensor cores multiply a
second, without sparsity. So each is as if cuBLAS, and everything else, reached these.
"""

import math

from _gpu_bytes import Step
from _gpu_units import Pipelined, Units
from eqquant._jax import GPU


# Products a cycle and core: of 16 bits summed in float32, and of 8 bits in int32.
rates = {"sm_80": (1024, 2048), "sm_89": (256, 1024), "sm_90a": (2048, 4096)}
# The same a second.
_peaks = {
    "sm_80": (156e12, 312e12),
    "sm_89": (82.6e12, 330.3e12),
    "sm_90a": (494.7e12, 989.5e12),
}
# From the end of a kernel to the start of the next.
pause = 2e-6


def dense(m: int, k: int, n: int, chip: GPU) -> float:
    """Seconds of a product in bfloat16 by cuBLAS."""
    moved = 2 * (m * k + k * n + m * n)
    products = m * k * n / _peaks[chip.architecture][0]
    return max(products, moved / chip.bandwidth) + pause


def of_xla(step: Step, chip: GPU) -> tuple[float, float]:
    """Of a kernel of XLA's, products as fast as those of cuBLAS: if another kernel
    converts before what the product converts, and if that costs nothing. XLA keeps
    what is faster."""
    time, converting = step.bytes / chip.bandwidth, 0.0
    if step.product is not None:
        peak = _peaks[chip.architecture][step.product.dtype == "s8"]
        time = max(time, step.product.products / peak)
        if step.product.converted:
            converting = step.product.converted / chip.bandwidth + pause
    return (time + converting + pause) * step.count, (time + pause) * step.count


def of_loop(step: Step, units: Units | None, chip: GPU) -> tuple[float, str]:
    """Of a kernel that multiplies nothing, by its bytes and the instructions of all of
    its threads; and what limits it."""
    limits = {"memory": step.bytes / chip.bandwidth}
    if units is not None:
        for unit, cycles in units.cycles(chip).items():
            limits[unit] = cycles / (chip.cores * chip.clock)
    limit, time = max(limits.items(), key=lambda item: item[1])
    limit = limit if time > pause else "pauses"
    return (time + pause) * step.count, limit


def by_kernel(
    step: Step, units: Units, rows: int, products: float, integers: bool, chip: GPU
) -> tuple[float, float]:
    """Of a kernel that decodes weights and multiplies each with so many rows of an
    activation: if tensor cores wait for all else in its loop, and if for nothing."""
    tensor = rows / rates[chip.architecture][integers]
    others = units.cycles(chip)
    at_peak = products / _peaks[chip.architecture][integers]
    moved = step.bytes / chip.bandwidth
    waiting = at_peak * (1 + max(others.values()) / tensor)
    free = at_peak * max(1, max(others.values()) / tensor)
    return max(waiting, moved) + pause, max(free, moved) + pause


def by_schedule(step: Step, busy: float, chip: GPU) -> tuple[float, float]:
    """Of a kernel that keeps cores busy for so many seconds."""
    time = max(busy, step.bytes / chip.bandwidth) + pause
    return time, time


def by_pipeline(
    step: Step,
    found: Pipelined,
    pipeline,
    m: int,
    k: int,
    n: int,
    integers: bool,
    chip: GPU,
) -> tuple[float, float]:
    """Of the kernel in which tensor cores multiply a step of one warpgroup while it
    decodes the next, and while the other one is between two steps.

    In both numbers, all programs wait for those with the most tiles, and a step takes
    as long as what is busiest in it. At worst a tile pauses for all that is not in a
    step, of one warpgroup after the other, and for a microsecond of waiting; at best
    the other warpgroup, and what is brought ahead, hide it."""
    rate, columns = rates[chip.architecture][integers], 128 if integers else 64
    weights = pipeline.rows * columns
    busy = max(found.step._replace(shared=found.shared / weights).cycles(chip).values())
    cycles = max(pipeline.m * weights / rate, busy * weights)
    # Of a warpgroup, if the other one has an instruction of tensor cores left.
    waits = max(0.0, found.between - 64 * 16 * pipeline.m / rate)
    tiles = math.ceil(m / pipeline.m) * math.ceil(n / pipeline.rows / pipeline.cluster)
    most = math.ceil(tiles / (chip.cores // pipeline.cluster))
    clock = _peaks[chip.architecture][integers] / rate / chip.cores
    pause_of_tile = 2 * found.tile / clock + 1e-6
    moved = step.bytes / chip.bandwidth
    best = most * math.ceil(k / columns) * (cycles + waits) / clock
    worst = best + most * pause_of_tile
    return max(worst, moved) + pause, max(best, moved) + pause
