"""Lower bounds for the run time of the kernels of a GPU program.

The bounds use NVIDIA's data sheets: the memory bandwidth, and the peak rate of tensor
cores without sparsity. They assume that every kernel, cuBLAS included, reaches these
rates. Kernels run one after another.
"""

import math

from _gpu_bytes import Step
from _gpu_units import Pipelined, Units
from eqquant._jax import GPU


# Multiplications per cycle and core: 16-bit with float32 sums, 8-bit with int32 sums.
rates = {"sm_80": (1024, 2048), "sm_89": (256, 1024), "sm_90a": (2048, 4096)}
# The same rates per second and chip.
_peaks = {
    "sm_80": (156e12, 312e12),
    "sm_89": (82.6e12, 330.3e12),
    "sm_90a": (494.7e12, 989.5e12),
}
# Seconds from the end of one kernel to the start of the next: an assumption.
pause = 2e-6


def dense(m: int, k: int, n: int, chip: GPU) -> float:
    """Return the seconds of a bfloat16 matmul by cuBLAS."""
    moved = 2 * (m * k + k * n + m * n)
    products = m * k * n / _peaks[chip.architecture][0]
    return max(products, moved / chip.bandwidth) + pause


def xla_time(step: Step, chip: GPU) -> tuple[float, float]:
    """Return the (longest, shortest) time of an XLA kernel, as fast as cuBLAS.

    The longest time includes a separate kernel that converts the operands. The shortest
    assumes that the matmul converts them at no cost. XLA picks the faster variant.
    """
    time, converting = step.bytes / chip.bandwidth, 0.0
    if step.product is not None:
        peak = _peaks[chip.architecture][step.product.dtype == "s8"]
        time = max(time, step.product.products / peak)
        if step.product.converted:
            converting = step.product.converted / chip.bandwidth + pause
    return (time + converting + pause) * step.count, (time + pause) * step.count


def elementwise_time(step: Step, units: Units | None, chip: GPU) -> tuple[float, str]:
    """Return the time of a kernel without a matmul, and the resource that limits it."""
    limits = {"memory": step.bytes / chip.bandwidth}
    if units is not None:
        for unit, cycles in units.cycles(chip).items():
            limits[unit] = cycles / (chip.cores * chip.clock)
    limit, time = max(limits.items(), key=lambda item: item[1])
    limit = limit if time > pause else "pauses"
    return (time + pause) * step.count, limit


def kernel_time(
    step: Step, units: Units, rows: int, products: float, integers: bool, chip: GPU
) -> tuple[float, float]:
    """Return the (longest, shortest) time of a kernel that decodes and multiplies.

    Each decoded weight is multiplied with `rows` rows of the activation. In the longest
    time, tensor cores wait for all other instructions of the loop; in the shortest they
    never wait.
    """
    tensor = rows / rates[chip.architecture][integers]
    others = units.cycles(chip)
    at_peak = products / _peaks[chip.architecture][integers]
    moved = step.bytes / chip.bandwidth
    waiting = at_peak * (1 + max(others.values()) / tensor)
    free = at_peak * max(1, max(others.values()) / tensor)
    return max(waiting, moved) + pause, max(free, moved) + pause


def scheduled_time(step: Step, busy: float, chip: GPU) -> tuple[float, float]:
    """Return the time of a kernel that keeps the cores busy for `busy` seconds."""
    time = max(busy, step.bytes / chip.bandwidth) + pause
    return time, time


def pipelined_time(
    step: Step,
    work: Pipelined,
    pipeline,
    m: int,
    k: int,
    n: int,
    integers: bool,
    chip: GPU,
) -> tuple[float, float]:
    """Return the (longest, shortest) time of the warp-specialized kernel for Hopper.

    Tensor cores multiply one step of a warpgroup while the warpgroup decodes the next
    step, and while the other warpgroup is between two steps.

    Both times wait for the program with the most tiles, and both count the busiest unit
    of a step. The longest time adds, for each tile, the work outside of its steps for
    both warpgroups and a microsecond of waiting. The shortest time assumes that the
    other warpgroup and prefetched data hide this work.
    """
    rate, columns = rates[chip.architecture][integers], 128 if integers else 64
    weights = pipeline.rows * columns
    busy = max(work.step._replace(shared=work.shared / weights).cycles(chip).values())
    cycles = max(pipeline.m * weights / rate, busy * weights)
    # One tensor-core instruction of the other warpgroup overlaps with the wait.
    waits = max(0.0, work.between - 64 * 16 * pipeline.m / rate)
    tiles = math.ceil(m / pipeline.m) * math.ceil(n / pipeline.rows / pipeline.cluster)
    rounds = math.ceil(tiles / (chip.cores // pipeline.cluster))
    clock = _peaks[chip.architecture][integers] / rate / chip.cores
    tile_overhead = 2 * work.tile / clock + 1e-6
    moved = step.bytes / chip.bandwidth
    best = rounds * math.ceil(k / columns) * (cycles + waits) / clock
    worst = best + rounds * tile_overhead
    return max(worst, moved) + pause, max(best, moved) + pause
