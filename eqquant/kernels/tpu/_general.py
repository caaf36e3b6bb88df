"""The kernel for any format, shape and direction.

A tile of the weight is decoded, scaled and cast to the dtype of the matrix unit, in
vector memory. For many rows of the activation the matrix unit hides the decoding.

One kernel serves both directions. `contracted` is the axis of the weight that is
contracted: 0 for `x @ w`, 1 for `x @ w.T`.
"""

import dataclasses
import functools as ft
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int8, Int32, Shaped

from ...formats import Format
from .._product import Product
from ._arrange import arrange, from_planes, is_simple, to_planes
from ._call import call
from ._chips import Chip, chip
from ._loop import loop, part_of
from ._tile_sizes import budget_of, choose_tiles, TileSizes
from ._tiles import (
    bits_of,
    chunk_bytes,
    lanes,
    look_up,
    pad_to,
    planes_of,
    result_like,
    tile_multiple,
)
from ._two_parts import read, stored_bytes, used_bytes
from ._weights import can_become, Decoder, is_exact, is_shifted


def _by_rows(
    scales: Float[Array, "blocks rows"], dtype
) -> Float[Array, "rows lanes"] | Int[Array, "half lanes"]:
    """Lay out the scales of a tile in whole registers for lookups."""
    scales = scales.T.astype(dtype)
    if dtype == jnp.bfloat16:  # Look up two adjacent rows together.
        scales = pltpu.bitcast(scales, jnp.int32)
    return pad_to(scales, 1, lanes)


def _spread(scales, start, size: int, block: int, dtype) -> Float[Array, "rows bytes"]:
    """Return the scale of each of `size` bytes from byte `start` on. Blocks have
    `block` bytes."""
    lane = lax.broadcasted_iota(jnp.int32, (scales.shape[0], lanes), 1)
    parts = []
    for offset in range(0, size, lanes):
        first = lax.div(start + offset, np.int32(block * lanes))
        register = scales[:, :lanes]
        for i in range(1, scales.shape[1] // lanes):
            later = scales[:, i * lanes : (i + 1) * lanes]
            register = jnp.where(first >= i, later, register)
        index = lax.div(lane + (start + offset), jnp.int32(block)) - first * lanes
        parts.append(pltpu.bitcast(look_up(register, index, 1), dtype))
    return jnp.concatenate(parts, 1) if len(parts) > 1 else parts[0]


def _masked(scales, axis: int, start: Int[Array, ""], size: int):
    """Replace out-of-bounds entries of an axis by zeros."""
    index = start + lax.broadcasted_iota(jnp.int32, scales.shape, axis)
    return jnp.where(index < size, scales, jnp.zeros_like(scales))


class _Operand:
    """Decode a tile of codes to operands of the matrix unit, one per plane. A level is
    an entry times `scale`."""

    def __init__(self, format: Format, dtype, exact_table: bool, chip: Chip):
        self.format, self.dtype = format, jnp.dtype(dtype)
        blocked = format.block_size is not None
        self.decode = None
        scaled = blocked or format.codebook is not None or is_shifted(format)
        floats = dtype == jnp.bfloat16 and can_become("float8", format, chip)
        floats = floats and not scaled
        by_bytes = dtype != jnp.float32 or format.history
        if floats or (by_bytes and can_become("int8", format, chip)):
            kind = "float8" if floats else "int8"
            digits = 2 if exact_table and not is_exact(format) else 1
            self.decode = Decoder(format, chip, kind, digits)
        self.scale = self.decode.scale if self.decode else 1.0
        # The dtype in which digits are combined and scaled.
        packed = chip.bfloat16 and dtype == jnp.bfloat16 and self.decode is not None
        self.compute = jnp.bfloat16 if packed else jnp.float32

    def __call__(self, codes, scales, tables) -> list:
        if self.decode is None:
            planes = range(planes_of(self.format))
            return [self._scale(self._by_levels(codes, p), scales) for p in planes]
        decoded = self.decode(self.decode.prepare(codes), tables)
        return [self._combine(digits, scales) for digits in decoded]

    def _combine(self, digits: list, scales):
        assert self.decode is not None
        if len(digits) == 1 and scales is None:
            casts = digits[0].dtype == jnp.int8 and self.dtype != jnp.int8
            return digits[0].astype(self.dtype) if casts else digits[0]
        w = self.decode.combine([digit.astype(self.compute) for digit in digits])
        return self._scale(w, scales)

    def _scale(self, w, scales):
        return (w if scales is None else w * scales).astype(self.dtype)

    def _by_levels(self, codes, plane: int):
        format = self.format
        codes = codes.astype(jnp.int32)
        if format.bits < 8:
            shift = bits_of(format) * (plane + 1) - format.bits
            codes = lax.shift_right_logical(codes, shift)
            codes = codes & (2**format.bits - 1)
        return format.levels(codes, self.compute)


@dataclasses.dataclass(frozen=True)
class _GeneralPlan:
    """The static choices for one product. Pairs have an entry for each axis of the
    weight."""

    product: Product
    chip: Chip
    tiles: TileSizes
    weight: _Operand

    @property
    def format(self) -> Format:
        return self.product.format

    @property
    def contracted(self) -> int:
        """The contracted axis of the weight."""
        return 0 if self.product.contract_rows else 1

    @property
    def free(self) -> int:
        return 1 - self.contracted

    @property
    def blocked(self) -> bool:
        return self.format.block_size is not None

    @property
    def planes(self) -> int:
        return planes_of(self.format)

    @property
    def sums(self):
        return jnp.int32 if self.weight.dtype == jnp.int8 else jnp.float32

    @property
    def packed(self) -> int:
        """Bytes in a row of the weight."""
        return used_bytes(self.product.packed, self.format)

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers in a tile of the weight."""
        return self.tiles.rows, self.tiles.bytes * self.planes

    @property
    def counts(self) -> tuple[int, int]:
        """The number of tiles of the weight."""
        rows = pl.cdiv(self.product.rows, self.tiles.rows)
        return rows, pl.cdiv(self.packed, self.tiles.bytes)

    @property
    def tile_scales(self) -> tuple[int, int]:
        """The number of scales in a tile of the weight."""
        blocks = self.product.blocks
        if self.format.block_size and self.tiles.bytes < self.packed:
            blocks = self.sizes[1] // self.format.block_size
        return self.tiles.rows, blocks

    @ft.cached_property
    def arranges(self) -> bool:
        """Whether the kernel permutes the activation to plane order.

        It does this once for all tiles of the weight, which requires a single tile of
        columns and a single core.
        """
        if not self.contracted or self.planes == 1 or not is_simple(self.format):
            return False
        if not self.counts[self.contracted] == self.chip.cores == 1:
            return False
        m, (rows, columns) = self.tiles.m, self.sizes
        used = m * (3 * columns + 2 * rows) * self.weight.dtype.itemsize
        used += 4 * m * rows + 3 * math.prod(self.sizes)
        return used <= budget_of(self.chip)


def _kernel(plan: _GeneralPlan, x, codes, scales, *rest):
    *x_scales, out, total = rest[: len(rest) - plan.arranges]
    step = pl.program_id(3)
    x = x.at[0]
    if plan.arranges:
        arranged = rest[-1]

        @pl.when(pl.program_id(2) == 0)
        def _():
            arrange(x, arranged, plan.format)

        x = arranged

    @pl.when(step == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    _accumulate(plan, x, codes, scales, total, step)

    @pl.when(step == plan.counts[plan.contracted] - 1)
    def _():
        result = total[...].astype(jnp.float32)
        if not plan.blocked:
            result = result * plan.weight.scale
            if plan.free == 0:
                result = result * scales[0].astype(jnp.float32)
        for x_scale in x_scales:
            result = result * x_scale[0, :, :1]
        out[0] = result.astype(out.dtype)


def _accumulate(plan: _GeneralPlan, x, codes, scales, total, step):
    """Add the product with one tile of the weight to `total`."""
    weight, planes, format = plan.weight, plan.planes, plan.format
    tile = plan.tiles.bytes
    tile_scales, block = None, (format.block_size or 0) * bits_of(format) // 8
    if plan.blocked:
        start = step * plan.tile_scales[plan.contracted]
        num_scales = (plan.product.rows, plan.product.blocks)[plan.contracted]
        # Scales have the axes `(blocks, rows)`, so the contracted axis is `plan.free`.
        # In bfloat16, the compiler cannot mask columns of up to four blocks.
        tile_scales = scales[0].astype(jnp.float32) * weight.scale
        tile_scales = _masked(tile_scales, plan.free, start, num_scales)
        tile_scales = _by_rows(tile_scales, weight.compute)
    tables = weight.decode.tables() if weight.decode else []
    # The compiler overlaps decoding a chunk with multiplying another.
    chunk = chunk_bytes(format) if planes > 1 else math.gcd(tile, 512)
    size = math.lcm(chunk, tile_multiple(format))
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None

    def add(i, carry):
        part_codes = part_of(codes.at[0], 1, i, stored_bytes(size, format))
        # Columns of the weight are columns of the activation, or of the result.
        part_x, part_total = x, total
        if plan.contracted:
            part_x = part_of(x, 1, i, size * planes)
        else:
            part_total = part_of(total, 1, i, size * planes)
        for start in range(0, size, chunk):
            scale = None
            if tile_scales is not None:
                first = jnp.int32(i * size + start)
                scale = _spread(tile_scales, first, chunk, block, weight.compute)
            part = read(part_codes, start, chunk, format)
            decoded = weight(part, scale, tables)
            w = jnp.concatenate(decoded, 1) if planes > 1 else decoded[0]
            columns = (slice(None), slice(start * planes, (start + chunk) * planes))
            x_index, total_index = (columns, ...) if plan.contracted else (..., columns)
            product = lax.dot_general(
                part_x[x_index],
                w,
                (((1,), (plan.contracted,)), ((), ())),
                precision=precision,
                preferred_element_type=plan.sums,
            )
            part_total[total_index] += product
        return carry

    # Cycles per weight: at least 1/256, the time to decode it.
    passes = 6 if weight.dtype == jnp.float32 else 1
    cycles = max(plan.tiles.m * passes / plan.chip.macs, 1 / 256)
    bundles = int(plan.tiles.rows * size * planes * cycles)
    loop(tile // size, add, bundles=bundles)


def dot(
    product: Product,
    x: Float[Array, "batch m size"] | Int8[Array, "batch m size"],
    codes: Shaped[Array, "stack rows packed"],
    scales: Float[Array, "some rows blocks"],
    index: Int32[Array, " batch"] | None = None,
    x_unit: Float[Array, "batch m 1"] | None = None,
    *,
    operand,
    exact_table: bool,
    interpret: bool,
    stacked: bool = False,
) -> Float[Array, "batch m out"]:
    """Compute a product.

    Both operands are multiplied in the dtype `operand`. The entries of a codebook keep
    15 bits if `exact_table`, otherwise 7. The result is multiplied by `x_unit`. With an
    index, codes are a stack, and scales as well if `stacked`.
    """
    batch, m, _ = x.shape
    format, contract_rows = product.format, product.contract_rows
    here = chip(product.compute.tpu)
    tiles = choose_tiles(product, operand, here)
    weight = _Operand(format, operand, exact_table, here)
    plan = _GeneralPlan(product, here, tiles, weight)
    bm, size = tiles.m, plan.sizes[plan.contracted]
    out_size, free = plan.sizes[plan.free], plan.counts[plan.free]

    # The columns of the weight are in plane order. The activation is permuted to it, or
    # the result from it. Scales of rows likewise multiply the activation or the result.
    if contract_rows and not plan.blocked and operand != jnp.int8:
        own = scales[index] if stacked else scales
        x = x * own[..., 0][:, None, :]
    x = x.astype(operand)
    if not contract_rows and not plan.arranges:
        x = to_planes(x, format, interpret)
    x = pad_to(pad_to(x, 1, bm), 2, size)
    x_scales = []
    if x_unit is not None:
        x_scales = [pad_to(jnp.broadcast_to(x_unit, (batch, m, lanes)), 1, bm)]
    columns = free * out_size if contract_rows else product.rows

    # The grid axes for rows and columns of the weight.
    row, column = (3, 2) if contract_rows else (2, 3)

    def at(*axes):
        """Return an index map to the grid indices of some axes, or to zero."""
        return lambda *i: tuple(0 if axis is None else i[axis] for axis in axes)

    stored, tile_scales = stored_bytes(tiles.bytes, format), plan.tile_scales[::-1]
    scales_at = at(0, column if plan.blocked else None, row)
    arranged = "arbitrary" if plan.arranges else "parallel"
    out = call(
        ft.partial(_kernel, plan),
        index,
        (False, True, stacked, False),
        grid=(batch, x.shape[1] // bm, free, plan.counts[plan.contracted]),
        in_specs=[
            pl.BlockSpec((1, bm, size), at(0, 1, 3)),
            pl.BlockSpec((1, tiles.rows, stored), at(0, row, column)),
            pl.BlockSpec((1, *tile_scales), scales_at),
            *[pl.BlockSpec((1, bm, lanes), at(0, 1, None)) for _ in x_scales],
        ],
        out_specs=pl.BlockSpec((1, bm, out_size), at(0, 1, 2)),
        out_shape=result_like(x, x.shape[1], columns, product.out_dtype),
        scratch_shapes=[
            pltpu.VMEM((bm, out_size), plan.sums),
            *[pltpu.VMEM((bm, size), operand)] * plan.arranges,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", arranged, "arbitrary"),
            vmem_limit_bytes=here.memory,
        ),
        interpret=interpret,
        name=f"{format.name}_{'rows' if contract_rows else 'columns'}",
    )(x, codes, jnp.swapaxes(scales, 1, 2), *x_scales)
    if contract_rows:
        out = from_planes(out[:, :m], plan.packed * plan.planes, format, interpret)
    return out[:, :m]
