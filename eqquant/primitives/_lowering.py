"""The lowering of `quantized_dot`: the choice of a kernel, and its call."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from .._jax import is_automatically_partitioned, is_exported
from ..formats import float_scales, num_bytes, num_codes, ShortScales
from ..kernels import choose, cpu, Kernel, Matmul, Product, View, xla
from ..partition import (
    DOT,
    DOT_OVER_ROWS,
    Partition,
    partition_product,
    Plan,
    plan_for,
    plan_from_types,
)
from ._offsets import add_offsets
from ._operands import codes_of, flatten, unflatten, without_offsets


# The kernels of each platform, in the order in which they are tried. The kernels of XLA
# serve every product.
Tiers = Sequence[Sequence[Kernel]]
PORTABLE: Tiers = (xla.KERNELS,)
PLATFORMS = "cpu", "gpu", "tpu"


def tiers_of(platform: str | None, exported: bool = False) -> Tiers:
    """Return the kernels of a platform.

    An exported program may run without the library of native kernels, or on another
    GPU.
    """
    if platform == "cpu" and not exported:
        return cpu.KERNELS, xla.KERNELS
    if platform == "gpu":
        from ..kernels import gpu

        # Without those that multiply int8, see `gpu_sums_int8`.
        portable = gpu.PORTABLE, xla.FLOAT_KERNELS
        return portable if exported else (gpu.KERNELS, *portable)
    if platform == "tpu":
        from ..kernels import tpu

        return tpu.KERNELS, xla.KERNELS
    return PORTABLE


def choose_kernel(
    tiers: Tiers, matmul: Matmul, x, codes, scales, over: tuple[str, ...] = ()
) -> tuple[Kernel, Product, str]:
    """Return the kernel of a product, the product as the kernel computes it, and the
    reason against the previous tier. `over` are the mesh axes over which the result is
    summed."""
    reason = ""
    for kernels in tiers:
        product = _for_parts(matmul, kernels, over).of(x, codes, scales)
        if product.is_symbolic and kernels not in (xla.KERNELS, xla.FLOAT_KERNELS):
            # Only the lowerings to XLA serve any size.
            reason = ", because the number of rows is a symbol"
            continue
        kernel = choose(kernels, product)
        if not isinstance(kernel, str):
            return kernel, product, reason
        reason = f", because {kernel}"
    raise AssertionError(f"no kernel computes the product{reason}")


def _for_parts(
    matmul: Matmul, kernels: Sequence[Kernel], over: tuple[str, ...]
) -> Matmul:
    # If rows of int8 activations are split over devices, some kernels would round the
    # activation again, by the largest value of a part.
    is_int8 = matmul.compute.activations == "int8"
    if over and is_int8 and not all(kernel.rounds_once for kernel in kernels):
        return matmul.with_compute(precision="highest")
    return matmul


def dot_by(tiers: Tiers) -> Callable:
    """Return the product as a function of raw arrays, for a device. With a view,
    `codes` is its stack."""

    def dot(
        x,
        codes,
        scales,
        offsets=None,
        view: View | None = None,
        *,
        matmul: Matmul,
        over: tuple[str, ...] = (),
    ):
        taken = codes_of(codes, view)
        kernel, product, _ = choose_kernel(tiers, matmul, x, taken, scales, over)
        if offsets is not None and not kernel.reads_offsets:
            view = without_offsets(view)
            out = dot(x, codes, scales, None, view, matmul=matmul.wide, over=over)
            return add_offsets(out, x, scales, offsets, matmul)
        x_unit = None
        rounded = not over and kernel.rounds_to_int8
        if matmul.compute.activations == "int8" and not rounded:
            x, x_unit = kernel.round_int8(x, over)
        if not kernel.reads_short_scales:
            short = isinstance(scales, ShortScales)
            dtype = kernel.scale_dtype(product) if short else scales.dtype
            scales = float_scales(scales, dtype)
        added: dict[str, Any] = {} if offsets is None else {"offsets": offsets}
        if view is not None and not kernel.reads_views:
            codes, view = view.take(codes), None
        if view is None:
            return kernel.lower(product, x, codes, scales, x_unit, **added)
        if not kernel.reads_short_scales and isinstance(view.scales, ShortScales):
            view = View(view.index, view.codes)  # Do not decode the scales of a stack.
        added["view"] = view
        return kernel.lower(product, x, codes, scales, x_unit, **added)

    return dot


def partition_of(matmul: Matmul, plan: Plan, x, codes, scales) -> Partition:
    """Return the partition of a product. Only the shapes of the operands are read."""
    format, rule, free = matmul.format, DOT, codes.shape[-2]
    if matmul.contract_rows:
        rule, free = DOT_OVER_ROWS, num_codes(codes.shape[-1], format.bits)
    shapes = x.shape, codes.shape, scales.shape
    group = num_bytes(format.group, format.bits)
    return partition_product(rule, plan, shapes, (*x.shape[:-1], free), group)


def _sharded(dot: Callable, plan: Plan, round_parts: bool) -> Callable:
    """Run a product on each device, by a plan."""

    def call(x, codes, scales, offsets=None, view=None, *, matmul: Matmul):
        view = without_offsets(view)
        if offsets is not None:
            out = call(x, codes, scales, None, view, matmul=matmul.wide)
            return add_offsets(out, x, scales, offsets, matmul)
        scales = float_scales(scales)
        partition = partition_of(matmul, plan, x, codes_of(codes, view), scales)
        if view is not None and not _reads_stacks(partition, view):
            codes, view = view.take(codes), None
        if view is not None and isinstance(view.scales, ShortScales):
            view = View(view.index, view.codes)  # They are not split.
        operands, stored = flatten(codes, (scales, None), view)
        if view is not None:
            partition = _over_stacks(partition, view)

        def local(*args):
            x, codes, *parts, dtype = args
            part = dataclasses.replace(matmul, out_dtype=dtype)
            numbers, view = unflatten(codes, parts, stored)
            return dot(x, codes, *numbers, view, matmul=part, over=partition.over)

        return partition.sharded(local, matmul.out_dtype, round_parts)(x, *operands)

    return call


def _reads_stacks(partition: Partition, view: View) -> bool:
    """Return whether each device reads its part of a stack in place: a weight that is
    gathered is sliced before."""
    _, *of_weight = partition.gathers
    return not any(map(any, of_weight)) and not view.index.ndim


def _over_stacks(partition: Partition, view: View) -> Partition:
    """Return the partition for the operands of a product with a view."""
    of_x, of_codes, of_scales = partition.in_specs
    stacked = lambda spec: PartitionSpec(None, *spec)
    specs = [of_x, stacked(of_codes), of_scales, PartitionSpec()]
    if view.scales is not None:
        specs.append(stacked(of_scales))
    gathers = ((),) * len(specs)
    return dataclasses.replace(partition, in_specs=tuple(specs), gathers=gathers)


def _lower_on(platform: str | None) -> Callable:
    """Return the lowering for a platform, and for programs exported for it."""

    def lower(ctx, *args, matmul: Matmul, plan: Plan | None, stored):
        dot = dot_by(tiers_of(platform, is_exported(ctx)))
        if is_automatically_partitioned(ctx):
            plan = plan_for(ctx, plan, *ctx.avals_in[:3])
            # The compiler can split programs of XLA over devices, but not a kernel.
            # XLA for TPU sums float32 parts in bfloat16 if the sum is rounded to it. A
            # kernel that rounds its part writes half of the bytes.
            rounds = platform == "tpu" and matmul.out_dtype == jnp.bfloat16
            dot = dot_by(PORTABLE) if plan is None else _sharded(dot, plan, rounds)

        def run(x, codes, *parts):
            numbers, view = unflatten(codes, parts, stored)
            return dot(x, codes, *numbers, view, matmul=matmul)

        return mlir.lower_fun(run, multiple_results=False)(ctx, *args)

    return lower


lowerings = {platform: _lower_on(platform) for platform in (None, *PLATFORMS)}


def implementation_on(platform: str) -> Callable:
    """Return the lowering of a product on a platform as a function of raw arrays."""
    return dot_by(tiers_of(platform))


def lowering_of(
    x,
    codes,
    scales,
    *,
    matmul: Matmul,
    plan: Plan | None = None,
    platform: str,
    devices: int = 1,
    view: View | None = None,
) -> str:
    """Describe the kernel of a product on a platform, and how it rounds activations.

    Only shapes and dtypes are read. With several `devices`, the plan describes the
    split, unless the mesh of the operands has explicit axes. With a view, `codes` is
    its stack.
    """
    tiers, over, text = tiers_of(platform), (), ""
    stack, codes = codes, codes_of(codes, view)
    plan = plan_from_types(x, stack, asked=plan) or plan
    if plan is not None and devices > 1:
        partition = partition_of(matmul, plan, x, codes, scales)
        over, text = partition.over, partition.describe()
        if view is not None and not _reads_stacks(partition, view):
            view = None
        x, codes, scales = partition.parts(x, codes, scales)
    elif devices > 1:
        tiers = PORTABLE
        text = (
            f", because it has no plan for {devices} devices: call eqquant.shard_tree"
        )
    kernel, product, reason = choose_kernel(tiers, matmul, x, codes, scales, over)
    if view is not None and kernel.reads_views:
        text += f", reads a stack of {stack.shape[0]} in place"
    return kernel.describe(product) + reason + text
