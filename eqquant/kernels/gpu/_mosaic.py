"""The kernel for many rows on Hopper, by Pallas and Mosaic GPU: decoding hidden behind
tensor cores.

A program has 128 rows of the weight and 256 of the activation, and three warpgroups.
One brings what is needed, a step of 64 columns at a time, several steps ahead. Two have
64 rows of the weight each. While tensor cores multiply a step of one, which they do by
themselves, it looks the codes of its next step up; and while it scales these, they
multiply that of the other.

Two programs have the same rows of the activation, each of which is brought to both at
once. There are as many programs as cores, and each computes several tiles of the
result, without a pause: the first steps of a tile are brought while the one before is
written.

Scales of blocks are rounded to bfloat16, and so is a level times its scale, as a weight
in bfloat16 would be. A scale for a whole row is multiplied in float32 with the result.
Integers of 8 bits are multiplied by integers as they are, in steps of 128 columns.
"""

import functools as ft

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Shaped

from ..._jax import mosaic_gpu_kernel
from ...formats import Format
from . import _emulate, _fragments
from ._lookup import Decoder
from ._pipeline import LINE, Pipeline, STEP, width_of
from ._table import size_of


def dot(
    x: Shaped[Array, "1 m size"],
    codes: Shaped[Array, "1 rows packed"],
    scales: Float[Array, "1 rows blocks"],
    x_unit: Float[Array, "1 m 1"] | None = None,
    *,
    format: Format,
    operand,
    pipeline: Pipeline,
    out_dtype,
    interpret: bool = False,
) -> Float[Array, "1 m rows"]:
    """`x @ w.T`, where `_pipeline.why_not` knows no reason; in integers if `operand` is
    int8, and `x` then, whose rows are in `x_unit`."""
    # Not every jaxlib has Mosaic for GPUs.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    x, codes, scales = x[0], codes[0], scales[0]
    (m, size), (rows, _), blocks = x.shape, codes.shape, scales.shape[1]
    blocked = blocks > 1
    stages, cluster = pipeline.stages, pipeline.cluster
    tile_m, tile_rows = pipeline.m, pipeline.rows
    if interpret:
        cluster = 1  # It knows no others.
    num_m, num_rows = pl.cdiv(m, tile_m), pl.cdiv(rows, tile_rows * cluster)
    integers = jnp.dtype(operand) == jnp.int8
    columns = LINE // x.dtype.itemsize
    steps = pl.cdiv(size, columns)
    clusters = min(pipeline.cores // cluster, num_m * num_rows)
    sums = jnp.int32 if integers else jnp.float32
    decoder = Decoder(format, operand, 1, interpret)
    width, of_step = width_of(format, columns), columns * format.bits // 8
    of_block = max(STEP // (format.block_size or STEP), 1) if blocked else 0
    once = min(8, num_m)
    if not blocked:
        # Read by threads: beyond the last row, too.
        scales = scales[:, 0].astype(jnp.float32)
        scales = jnp.pad(scales, (0, num_rows * cluster * tile_rows - rows))
    units = []
    if x_unit is not None:
        x_unit = x_unit[0, :, 0].astype(jnp.float32)
        units.append(jnp.pad(x_unit, (0, num_m * tile_m - m)))
    out_shape = m, rows
    if interpret:  # Nor does it copy what is beyond an array as zeros.
        out_shape = num_m * tile_m, num_rows * tile_rows
        x = jnp.pad(x, ((0, out_shape[0] - m), (0, steps * columns - size)))
        codes = jnp.pad(codes, ((0, out_shape[1] - rows), (0, -codes.shape[1] % width)))
        if blocked:
            scales = jnp.pad(scales, ((0, out_shape[1] - rows), (0, -blocks % 4)))

    def swizzled(bytes: int, itemsize: int) -> tuple:
        if bytes == 16:
            return ()
        tiling = plgpu.TilingTransform((8, bytes // itemsize))
        return tiling, plgpu.SwizzleTransform(bytes)

    def place(i) -> tuple:
        """Of a tile. Those that are computed at once share rows of both operands."""
        group = lax.div(i, jnp.int32(once * num_rows))
        i = lax.rem(i, jnp.int32(once * num_rows))
        high = jnp.minimum(once, num_m - group * once)
        return group * once + lax.rem(i, high), lax.div(i, high)

    def kernel(x, codes, scales, *refs):
        units, refs = refs[:integers], refs[integers:]
        out, xs, qs, outs, full, empty, *refs = refs
        ss, refs = refs[:blocked], refs[blocked:]
        held, refs = refs[:interpret], refs[interpret:]
        table = refs[0] if refs else None
        thread, block = lax.axis_index("thread"), lax.axis_index("block")
        first = lax.axis_index("cluster")
        count = lax.div(num_m * num_rows - first + clusters - 1, jnp.int32(clusters))

        def each_tile(do) -> None:
            def tile(i, _):
                at_m, at_row = place(first + i * clusters)
                do(i * steps, at_m * tile_m, (at_row * cluster + block) * tile_rows)

            lax.fori_loop(0, count, tile, None)

        def slot_of(step):
            return lax.rem(step, jnp.int32(stages))

        def bring(start, at_m, at_row) -> None:
            def step(k, _):
                slot = slot_of(start + k)

                @pl.when(start + k >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                def copy(source, row, size, column, width, to, **options):
                    plgpu.copy_gmem_to_smem(
                        source.at[pl.ds(row, size), pl.ds(column, width)],
                        to.at[slot],
                        full.at[slot],
                        **options,
                    )

                both = {} if cluster == 1 else {"collective_axes": "block"}
                copy(x, at_m, tile_m, k * columns, columns, xs, **both)
                byte = lax.div(k * of_step, jnp.int32(width)) * width
                copy(codes, at_row, tile_rows, byte, width, qs)
                for to in ss:
                    column = lax.div(scale_of(k), jnp.int32(4)) * 4
                    copy(scales, at_row, tile_rows, column, 4, to)

            lax.fori_loop(0, steps, step, None)

        def scale_of(k):
            if of_block > 1:
                return k * of_block
            return lax.div(k, jnp.int32((format.block_size or STEP) // STEP))

        def decode(k, slot):
            q, scale = qs.at[slot], None
            if of_step < width:
                at = lax.rem(k, jnp.int32(width // of_step)) * of_step
                q = q.at[:, pl.ds(at, of_step)]
            for ref in ss:
                at = lax.rem(scale_of(k), jnp.int32(4))
                scale = ref.at[slot, :, pl.ds(at, of_block)]
            if interpret:
                scales = None if scale is None else scale[...]
                return _emulate.decode(q[...], scales, thread, decoder, format)
            transforms = swizzled(width, 1)
            return _fragments.decode(
                q, scale, table, decoder, format, width, transforms
            )

        def finish(levels, units):
            if interpret:
                return levels * units if blocked else levels
            return _fragments.finish(levels, units, of_block)

        def multiply(start, at_m, at_row) -> None:
            at_row = at_row + thread * 64

            def decoded(k):
                slot = slot_of(start + k)
                plgpu.barrier_wait(full.at[slot])
                if integers:
                    some = qs.at[slot, pl.ds(thread * 64, 64)]
                    return some[...] if interpret else some
                return decode(k, slot)

            def sum(total) -> None:
                def multiply(k, some):
                    xs_k = xs.at[slot_of(start + k)]
                    some = some if integers else finish(*some)
                    if interpret:  # It multiplies nothing in registers.
                        more = jnp.dot(some, xs_k[...].T, preferred_element_type=sums)
                        total[...] = total[...] + more
                    else:
                        plgpu.wgmma(total, some, plgpu.transpose_ref(xs_k, (1, 0)))

                def release(k, running=0):
                    plgpu.wgmma_wait(running)
                    plgpu.barrier_arrive(empty.at[slot_of(start + k)])

                def step_of_integers(k, _):
                    multiply(k, decoded(k))

                    @pl.when(k > 0)
                    def _():
                        release(k - 1, running=1)

                if integers:  # As they are in memory.
                    lax.fori_loop(0, steps, step_of_integers, None)
                    release(steps - 1)
                    write(total[...], at_m, at_row)
                    return

                def step(k, some):
                    multiply(k, some)
                    some = decoded(k + 1)
                    release(k)
                    return some

                some = lax.fori_loop(0, steps - 1, step, decoded(0))
                multiply(steps - 1, some)
                release(steps - 1)
                write(total[...], at_m, at_row)

            if not interpret:
                pl.run_scoped(sum, plgpu.WGMMAAccumulatorRef((64, tile_m), sums))
                return
            (total,) = (ref.at[thread] for ref in held)
            total[...] = jnp.zeros(total.shape, total.dtype)
            sum(total)

        def write(result, at_m, at_row) -> None:
            def scaled(some, by, start, axis: int, unit: float = 1):
                """By a number for each place on an axis."""
                by = by.at[pl.ds(start, some.shape[axis])]
                if interpret:
                    by = by[...]
                else:
                    layout = plgpu.Layout.WGMMA.reduce(1 - axis)
                    by = plgpu.load(by, (), layout=layout, optimized=False)
                return some * lax.broadcast_in_dim(by * unit, some.shape, (axis,))

            result = result.astype(jnp.float32)
            if not blocked:
                result = scaled(result, scales, at_row, 0, decoder.unit)
            for part in range(tile_m // outs.shape[2]):
                at, slot = part * outs.shape[2], part % 2
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                to, some = outs.at[thread, slot], result[:, at : at + outs.shape[2]]
                for unit in units:
                    some = scaled(some, unit, at_m + at, 1)
                some = some.astype(out_dtype)
                if interpret:
                    to[...] = some.T
                else:
                    _fragments.store(some, to, swizzled(128, 2))
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    to,
                    out.at[pl.ds(at_m + at, outs.shape[2]), pl.ds(at_row, 64)],
                )

        if table is not None:
            _fragments.fill(decoder, table)

        @pl.when(thread == 2)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            each_tile(bring)
            # Not gone before the last of what other programs tell this one.
            for last in range(1, stages + 1):

                @pl.when(count * steps >= last)
                def _(last=last):
                    plgpu.barrier_wait(empty.at[slot_of(count * steps - last)])

        @pl.when(thread < 2)
        def _():
            plgpu.set_max_registers(232, action="increase")
            each_tile(multiply)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    smem = lambda shape, dtype, transforms: plgpu.SMEM(
        shape, dtype, transforms=transforms
    )
    consumed = plgpu.Barrier
    if cluster > 1:
        consumed = ft.partial(plgpu.ClusterBarrier, collective_axes=("block",))
    scratch = [
        smem((stages, tile_m, columns), x.dtype, swizzled(LINE, x.dtype.itemsize)),
        smem((stages, tile_rows, width), codes.dtype, swizzled(width, 1)),
        smem((2, 2, tile_m // 4, 64), out_dtype, swizzled(128, 2)),
        plgpu.Barrier(num_arrivals=2 + blocked, num_barriers=stages),
        consumed(num_arrivals=2, num_barriers=stages),
        *[plgpu.SMEM((stages, tile_rows, 4), scales.dtype)] * blocked,
        *[plgpu.SMEM((2, 64, tile_m), sums)] * interpret,
        *[plgpu.SMEM((size_of(format.bits) // 4,), jnp.int32)]
        * (decoder.looks_up and not interpret),
    ]
    kernel.__name__ = kernel.__qualname__ = f"{format.name}_columns"
    out = mosaic_gpu_kernel(
        kernel,
        jax.ShapeDtypeStruct(out_shape, out_dtype),
        scratch,
        interpret=interpret,
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(cluster,),
        cluster_names=("block",),
        num_threads=3,
        thread_name="thread",
    )(x, codes, scales, *units)
    return out[None, :m, :rows] if interpret else out[None]
