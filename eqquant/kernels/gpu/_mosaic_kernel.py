"""The Mosaic kernel: tensor cores multiply while other instructions decode.

A program computes a tile of 128 rows of the weight and 256 rows of the activation, with
three warpgroups. One copies the operands to shared memory, several pipeline steps of 64
columns ahead. The other two compute 64 rows of the weight each. While `wgmma` runs
asynchronously for one step, a warpgroup looks up the codes of its next step. While it
scales them, the tensor cores run the `wgmma` of the other warpgroup.

Two programs form a cluster and share the rows of the activation, which are multicast.
The grid has one program per core. Each computes several tiles without a pause: the
first steps of a tile are prefetched while the previous tile is written.

Block scales are rounded to bfloat16. So is the product of a level and its scale, as
in a bfloat16 weight. Per-row scales multiply the result in float32. int8 codes are
multiplied with an int8 activation without decoding, in steps of 128 columns.
"""

import dataclasses
import functools as ft
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..._jax import mosaic_gpu_load
from . import _emulate, _fragments
from ._mosaic_plan import MosaicPlan
from ._pipeline import LINE
from ._table import size_of


@dataclasses.dataclass(frozen=True)
class _Refs:
    """The references of a program. `warpgroup` is 2 in the one that copies.

    - `x`, `codes`, `scales`, `x_scales`, `index`, `out`: in global memory. `x_scales`
        is None unless operands are integers. `index` is the position in a stack, or
        None.
    - `x_slots`, `code_slots`, `scale_slots`: circular buffers of pipeline steps. If a
        row has one scale, `scale_slots` is None.
    - `out_slots`: two buffers per warpgroup.
    - `full`, `empty`: barriers per slot.
    - `sums`: the accumulators in interpret mode, otherwise None.
    - `table`: the lookup table, or None.
    """

    x: Any
    codes: Any
    scales: Any
    x_scales: Any
    index: Any
    out: Any
    x_slots: Any
    code_slots: Any
    out_slots: Any
    full: Any
    empty: Any
    scale_slots: Any
    sums: Any
    table: Any
    warpgroup: Any
    block: Any

    @classmethod
    def make(cls, plan: MosaicPlan, refs: tuple) -> "_Refs":
        remaining = iter(refs)
        take = lambda condition=True: next(remaining) if condition else None
        return cls(
            x=take(),
            codes=take(),
            scales=take(),
            x_scales=take(plan.integers),
            index=take(plan.stacked[0]),
            out=take(),
            x_slots=take(),
            code_slots=take(),
            out_slots=take(),
            full=take(),
            empty=take(),
            scale_slots=take(plan.blocked),
            sums=take(plan.interpret),
            table=take(_has_table(plan)),
            warpgroup=lax.axis_index("warpgroup"),
            block=lax.axis_index("block"),
        )


class _Tile(NamedTuple):
    """A tile of the result: its first pipeline step, and its first row of the
    activation and of the weight."""

    start: Any
    m: Any
    row: Any


def _has_table(plan: MosaicPlan) -> bool:
    return plan.decoder.looks_up and not plan.interpret


def _swizzle(row_bytes: int, itemsize: int) -> tuple:
    """Return the transforms of rows in shared memory."""
    if row_bytes == 16:
        return ()
    tiling = plgpu.TilingTransform((8, row_bytes // itemsize))
    return tiling, plgpu.SwizzleTransform(row_bytes)


def scratch_types(plan: MosaicPlan) -> list:
    """Return the types of shared memory and barriers, in the order of [`_Refs`][]."""
    tiles, stages = plan.pipeline, plan.pipeline.stages
    smem = lambda shape, dtype, transforms: plgpu.SMEM(
        shape, dtype, transforms=transforms
    )
    empty = plgpu.Barrier
    if tiles.cluster > 1:
        empty = ft.partial(plgpu.ClusterBarrier, collective_axes=("block",))
    x_swizzle = _swizzle(LINE, plan.product.x.dtype.itemsize)
    code_shape = stages, tiles.rows, plan.width
    table_shape = (size_of(plan.product.format.bits) // 4,)
    return [
        smem((stages, tiles.m, plan.columns), plan.product.x.dtype, x_swizzle),
        smem(code_shape, plan.product.codes.dtype, _swizzle(plan.width, 1)),
        smem((2, 2, tiles.m // 4, 64), plan.product.out_dtype, _swizzle(128, 2)),
        plgpu.Barrier(num_arrivals=2 + plan.blocked, num_barriers=stages),
        empty(num_arrivals=2, num_barriers=stages),
        *[plgpu.SMEM((stages, tiles.rows, 4), jnp.float32)] * plan.blocked,
        *[plgpu.SMEM((2, 64, tiles.m), plan.sum_dtype)] * plan.interpret,
        *[plgpu.SMEM(table_shape, jnp.int32)] * _has_table(plan),
    ]


def kernel(plan: MosaicPlan, *refs) -> None:
    refs = _Refs.make(plan, refs)
    cluster, stages = lax.axis_index("cluster"), plan.pipeline.stages
    remaining = plan.num_tiles - cluster + plan.clusters - 1
    num_tiles = lax.div(remaining, jnp.int32(plan.clusters))

    def for_each_tile(run) -> None:
        def body(i, _):
            m, row = plan.tile(cluster + i * plan.clusters)
            start, m = i * plan.steps, m * plan.pipeline.m
            row = (row * plan.pipeline.cluster + refs.block) * plan.pipeline.rows
            run(plan, refs, _Tile(start, m, row))

        lax.fori_loop(0, num_tiles, body, None)

    if refs.table is not None:
        _fragments.fill(plan.decoder, refs.table)

    @pl.when(refs.warpgroup == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        for_each_tile(_prefetch_tile)
        # Other programs of the cluster still signal the barriers of this one.
        for last in range(1, stages + 1):

            @pl.when(num_tiles * plan.steps >= last)
            def _(last=last):
                slot = plan.slot(num_tiles * plan.steps - last)
                plgpu.barrier_wait(refs.empty.at[slot])

    @pl.when(refs.warpgroup < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        for_each_tile(_multiply_tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _prefetch_tile(plan: MosaicPlan, refs: _Refs, tile: _Tile) -> None:
    """Copy the operands of a tile to shared memory, one pipeline step at a time."""
    tile_m, tile_rows = plan.pipeline.m, plan.pipeline.rows
    multicast = {"collective_axes": "block"} if plan.pipeline.cluster > 1 else {}
    # The rows of a stack before those of this matrix. The last tile may copy rows of
    # the next matrix, whose results are not written.
    before = refs.index[0] * plan.product.rows if refs.index is not None else 0

    def step(k, _):
        slot = plan.slot(tile.start + k)

        @pl.when(tile.start + k >= plan.pipeline.stages)
        def _():
            plgpu.barrier_wait(refs.empty.at[slot])

        def copy(source, rows, columns, to, **options) -> None:
            source, full = source.at[pl.ds(*rows), pl.ds(*columns)], refs.full.at[slot]
            plgpu.copy_gmem_to_smem(source, to.at[slot], full, **options)

        rows, columns = (tile.m, tile_m), (k * plan.columns, plan.columns)
        copy(refs.x, rows, columns, refs.x_slots, **multicast)
        rows = tile.row + (before if plan.stacked[0] else 0), tile_rows
        byte = lax.div(k * plan.step_bytes, jnp.int32(plan.width)) * plan.width
        copy(refs.codes, rows, (byte, plan.width), refs.code_slots)
        if plan.blocked:  # A copy has at least 16 bytes per row.
            rows = tile.row + (before if plan.stacked[1] else 0), tile_rows
            column = lax.div(plan.first_scale(k), jnp.int32(4)) * 4
            copy(refs.scales, rows, (column, 4), refs.scale_slots)

    lax.fori_loop(0, plan.steps, step, None)


def _multiply_tile(plan: MosaicPlan, refs: _Refs, tile: _Tile) -> None:
    """Compute and write the 64 rows of the weight that a warpgroup has of a tile."""
    tile = tile._replace(row=tile.row + refs.warpgroup * 64)
    contract = ft.partial(_contract, plan, refs, tile)
    if not plan.interpret:
        shape = 64, plan.pipeline.m
        pl.run_scoped(contract, plgpu.WGMMAAccumulatorRef(shape, plan.sum_dtype))
        return
    total = refs.sums.at[refs.warpgroup]
    total[...] = jnp.zeros(total.shape, total.dtype)
    contract(total)


def _contract(plan: MosaicPlan, refs: _Refs, tile: _Tile, total) -> None:
    """Run the pipeline of a tile and write its result."""
    load = ft.partial(_load, plan, refs, tile.start)
    multiply = ft.partial(_multiply, plan, refs, tile.start, total)
    release = ft.partial(_release, plan, refs, tile.start)

    def integer_step(k, _):
        multiply(k, load(k))

        @pl.when(k > 0)
        def _():
            release(k - 1, running=1)

    def step(k, loaded):
        multiply(k, loaded)
        loaded = load(k + 1)  # While the tensor cores multiply.
        release(k)
        return loaded

    if plan.integers:
        lax.fori_loop(0, plan.steps, integer_step, None)
    else:
        loaded = lax.fori_loop(0, plan.steps - 1, step, load(0))
        multiply(plan.steps - 1, loaded)
    release(plan.steps - 1)
    _write(plan, refs, total[...], tile)


def _load(plan: MosaicPlan, refs: _Refs, start, k):
    """Wait for the operands of step `k` and return the weight: a reference to
    integers, or unscaled levels and their scales."""
    slot = plan.slot(start + k)
    plgpu.barrier_wait(refs.full.at[slot])
    if plan.integers:
        codes = refs.code_slots.at[slot, pl.ds(refs.warpgroup * 64, 64)]
        return codes[...] if plan.interpret else codes
    codes, scales = refs.code_slots.at[slot], None
    if plan.step_bytes < plan.width:
        steps = jnp.int32(plan.width // plan.step_bytes)
        codes = codes.at[:, pl.ds(lax.rem(k, steps) * plan.step_bytes, plan.step_bytes)]
    if plan.blocked:
        first = lax.rem(plan.first_scale(k), jnp.int32(4))
        scales = refs.scale_slots.at[slot, :, pl.ds(first, plan.step_scales)]
    if plan.interpret:
        scales = None if scales is None else scales[...]
        return _emulate.decode(
            codes[...], scales, refs.warpgroup, plan.decoder, plan.product.format
        )
    return _fragments.decode(
        codes,
        scales,
        refs.table,
        plan.decoder,
        plan.product.format,
        plan.width,
        _swizzle(plan.width, 1),
    )


def _multiply(plan: MosaicPlan, refs: _Refs, start, total, k, loaded) -> None:
    """Start the `wgmma` of step `k`."""
    x = refs.x_slots.at[plan.slot(start + k)]
    w = loaded if plan.integers else _scale(plan, *loaded)
    if plan.interpret:  # Interpret mode has no `wgmma` with operands in registers.
        product = jnp.dot(w, x[...].T, preferred_element_type=plan.sum_dtype)
        total[...] = total[...] + product
    else:
        plgpu.wgmma(total, w, x.transpose((1, 0)))


def _scale(plan: MosaicPlan, levels, scales):
    """Return the scaled operand."""
    if plan.interpret:
        return levels * scales if plan.blocked else levels
    return _fragments.finish(levels, scales, plan.step_scales)


def _release(plan: MosaicPlan, refs: _Refs, start, k, running: int = 0) -> None:
    """Wait until at most `running` later `wgmma`s run, and free the slot of step
    `k`."""
    plgpu.wgmma_wait(running)
    plgpu.barrier_arrive(refs.empty.at[plan.slot(start + k)])


def _write(plan: MosaicPlan, refs: _Refs, result, tile: _Tile) -> None:
    """Scale the result of a tile and copy it to global memory, in four parts."""
    result = result.astype(jnp.float32)
    if not plan.blocked:
        scale = plan.decoder.scale
        result = _times(plan, result, refs.scales, tile.row, 0, scale)
    size = refs.out_slots.shape[2]
    for i in range(plan.pipeline.m // size):
        start, slot = i * size, i % 2
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        buffer = refs.out_slots.at[refs.warpgroup, slot]
        part = result[:, start : start + size]
        if refs.x_scales is not None:
            part = _times(plan, part, refs.x_scales, tile.m + start, 1)
        part = part.astype(plan.product.out_dtype)
        if plan.interpret:
            buffer[...] = part.T
        else:
            _fragments.store(part, buffer, _swizzle(128, 2))
        plgpu.commit_smem()
        out = refs.out.at[pl.ds(tile.m + start, size), pl.ds(tile.row, 64)]
        plgpu.copy_smem_to_gmem(buffer, out)


def _times(plan: MosaicPlan, part, scales, start, axis: int, factor: float = 1):
    """Multiply an axis by `factor` times the scales from `start` on."""
    scales = scales.at[pl.ds(start, part.shape[axis])]
    if plan.interpret:
        scales = scales[...]
    else:
        layout = plgpu.Layout.WGMMA.reduce(1 - axis)
        scales = mosaic_gpu_load(scales, layout=layout, optimized=False)
    return part * lax.broadcast_in_dim(scales * factor, part.shape, (axis,))
