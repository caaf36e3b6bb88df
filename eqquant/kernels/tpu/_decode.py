"""The kernel for few rows, where reading the weight is all that should cost time.

Weights go to the matrix unit as bytes (see `_weights.py`), and are not scaled. Scales
are applied to the result instead, one row of them for each block, for which the
activation is spread out: the rows of one block are zero in the others.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int8, Shaped

from ...formats import Format
from ._arrange import is_simple
from ._chips import Chip, Kind
from ._loop import loop, part_of
from ._operands import choose_operands
from ._spread import interleave, spread, turn
from ._three_bits import read, stored_bytes, used_bytes
from ._tiles import lanes, pad_to, planes_of, result_like, tile_multiple
from ._weights import can_become, Decoder, is_exact


def _block_bytes(format: Format) -> int:
    return (format.block_size or format.group) // planes_of(format)


def _num_blocks(format: Format) -> int:
    """How many blocks 128 bytes of codes have, for each of which there are rows."""
    return lanes // _block_bytes(format) if format.block_size else 1


def fits(m: int, columns: int, format: Format, chip: Chip) -> bool:
    """Whether there is such a kernel."""
    kinds: tuple[Kind, ...] = ("int8", "float8")
    if m > 32 or not any(can_become(kind, format, chip) for kind in kinds):
        return False
    if not is_simple(format) or _num_blocks(format) > 8:
        return False
    spread = 2 * _num_blocks(format) * m * columns
    return spread <= 2**21 and columns // planes_of(format) * lanes <= 2**21


def contract_columns(
    x: Float[Array, "batch m columns"] | Int8[Array, "batch m columns"],
    codes: Shaped[Array, "batch rows packed"],
    scales: Float[Array, "batch rows blocks"],
    *,
    format: Format,
    exact: bool,
    exact_table: bool,
    out_dtype,
    chip: Chip,
    interpret: bool,
) -> Float[Array, "batch m rows"]:
    """`x @ w.T`, of an activation that keeps 15 bits of each entry (`exact`), or 7; the
    table of a format likewise."""
    batch, m, _ = x.shape
    _, rows, packed = codes.shape
    blocks = scales.shape[-1]
    packed, planes = used_bytes(packed, format), planes_of(format)
    group = _num_blocks(format)

    # Whole registers: sums of the rows of a block then need no shuffling.
    x = pad_to(pad_to(x, 1, 8), 2, tile_multiple(format) * planes)
    padded = x.shape[1]
    operands = choose_operands(
        m,
        x.shape[2],
        x.dtype,
        format,
        exact=exact,
        exact_table=exact_table,
        chip=chip,
    )
    kind, digits, turned = operands.kind, operands.digits, operands.turned
    if interpret and digits.dtype == jnp.int4:  # XLA for CPUs does not multiply it.
        digits = dataclasses.replace(digits, dtype=jnp.int8)
    count = 2 if exact_table or kind == "float8" else 1
    decode = Decoder(
        format,
        chip,
        kind,
        count if format.codebook and not is_exact(format) else 1,
        logic=chip.logic,
    )
    multiple = tile_multiple(format)
    size = pl.cdiv(packed, multiple) * multiple
    most, chunk = chip.steps_of(format)
    chunk = lanes if format.block_size else math.gcd(chunk, size)
    most = chip.options.tile_n or most
    most = min(most, min(2**22, chip.memory // 8) // size)
    multiple = lanes * max(turned, 1)
    bn = min(pl.cdiv(most, multiple), pl.cdiv(rows, multiple)) * multiple
    group = 2 if turned == 2 else group
    product_dtype = jnp.int32 if digits.integers else jnp.float32
    span = chunk * planes * max(turned, 1)
    steps = pl.cdiv(rows, bn)
    cores = min(chip.cores, steps)

    def multiply(x, w):
        if jnp.issubdtype(w.dtype, jnp.integer):  # Which every bfloat16 can be.
            w = w.astype(x.dtype)
        contracted = ((1,), (0 if turned else 1,))
        return lax.dot_general(
            x, w, (contracted, ((), ())), preferred_element_type=product_dtype
        )

    def rows_of(product, block: int) -> Float[Array, "m rows"]:
        """Those of one block, the digits of the activation put together."""
        first = block * digits.count * padded
        total, *rest = (
            product[first + i * padded :][:padded].astype(jnp.float32)
            for i in range(digits.count)
        )
        for low in rest:
            total = (total * digits.base if digits.base > 1 else total) + low
        return total

    # XLA keeps scales transposed in memory, as that wastes less of it, unless they fill
    # whole registers: then it would transpose them, by a pass over them.
    wide = blocks % lanes == 0

    # Chunks of an iteration: their scales are whole registers, and their codes, too.
    per = tile_multiple(format) // math.gcd(tile_multiple(format), chunk)
    known = size
    if format.block_size:
        register = 8 if wide else 32 // scales.dtype.itemsize
        per = math.lcm(per, register // math.gcd(register, group))
        known = min(size, blocks * _block_bytes(format))
    iterations = known // (per * chunk)

    def kernel(x, codes, scales, out, spread_x, unit, *scratch):
        tables, turned_scales = scratch[: decode.num_tables], scales.at[0]
        sum_x = scratch[decode.num_tables] if decode.offset else None
        if wide:
            turned_scales = scratch[-1]
            _transpose(scales.at[0], turned_scales)

        @pl.when(pl.program_id(2) == 0)
        def _():  # Each core, while the next tiles are on their way.
            for ref, table in zip(tables, decode.tables(), strict=True):
                ref[...] = table
            spread(
                x.at[0],
                spread_x,
                unit,
                sum_x,
                decode=decode,
                digits=digits,
                group=group,
                chunk=chunk,
                turned=turned,
            )

        looked_up = [table[...] for table in tables]

        def add(i, sums: list) -> list:
            """The products with some chunks of codes."""
            some_codes = part_of(codes.at[0], 1, i, stored_bytes(per * chunk, format))
            some_x = part_of(spread_x, 1, i, per * span)
            for j in range(some_x.shape[1] // span):
                part = read(some_codes, j * chunk, chunk, format)
                part = turn(part, turned) if turned else part
                decoded = decode(part, looked_up)
                products = [
                    multiply(
                        some_x[:, j * span : (j + 1) * span],
                        jnp.concatenate(digit, 0 if turned else 1)
                        if len(decode.planes) > 1
                        else digit[0],
                    )
                    for digit in zip(*decoded, strict=True)
                ]
                if not format.block_size:
                    sums = list(map(jnp.add, sums, products))
                    continue
                some_scales = part_of(turned_scales, 0, i, per * group)
                if kind == "float8":  # One base for all: rows may be added first.
                    products = [decode.combine(products)]
                for row in range(j * group, min((j + 1) * group, some_scales.shape[0])):
                    block = row - j * group
                    value = decode.combine([rows_of(p, block) for p in products])
                    scale = some_scales[row : row + 1, :].astype(jnp.float32)
                    sums = [sums[0] + value * scale]
            return sums

        sums = [jnp.zeros((padded, bn), jnp.float32)]
        if not format.block_size:
            shape = group * digits.count * padded, bn // max(turned, 1)
            sums = [jnp.zeros(shape, product_dtype)] * max(decode.num_tables, 1)
        bundles = 6 * max(decode.num_tables, 1) * bn * per * chunk * planes // 4096
        sums = loop(iterations, add, sums, bundles=bundles)
        if iterations * per * chunk < size:
            sums = add(iterations, sums)
        total = sums[0]
        if not format.block_size:
            total = decode.combine([rows_of(p, 0) for p in sums])
            if turned == 2:
                odd = decode.combine([rows_of(p, 1) for p in sums])
                total = interleave(total, odd)
            if sum_x is not None:
                total = total + sum_x[:, :1] * decode.offset
            total = total * turned_scales[...].astype(jnp.float32)
        out[0] = (total * (unit[:, :1] * decode.unit)).astype(out.dtype)

    def tile(core, step):
        """The last one again, if there are not as many for each core."""
        return jnp.minimum(core * pl.cdiv(steps, cores) + step, steps - 1)

    out = pl.pallas_call(
        kernel,
        grid=(batch, cores, pl.cdiv(steps, cores)),
        in_specs=[
            pl.BlockSpec((1, padded, x.shape[2]), lambda b, c, j: (b, 0, 0)),
            pl.BlockSpec(
                (1, bn, stored_bytes(size, format)), lambda b, c, j: (b, tile(c, j), 0)
            ),
            pl.BlockSpec((1, bn, blocks), lambda b, c, j: (b, tile(c, j), 0))
            if wide
            else pl.BlockSpec((1, blocks, bn), lambda b, c, j: (b, 0, tile(c, j))),
        ],
        out_specs=pl.BlockSpec((1, padded, bn), lambda b, c, j: (b, 0, tile(c, j))),
        out_shape=result_like(x, padded, rows, out_dtype),
        scratch_shapes=[
            pltpu.VMEM(
                (group * digits.count * padded, size * planes * max(turned, 1)),
                digits.dtype,
            ),
            pltpu.VMEM((padded, lanes), jnp.float32),
            *[pltpu.VMEM((32, lanes), jnp.int8)] * decode.num_tables,
            *[pltpu.VMEM((padded, lanes), jnp.float32)] * bool(decode.offset),
            *[pltpu.VMEM((blocks, bn), jnp.float32)] * wide,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name=f"{format.name}_decode",
    )(x, codes, scales if wide else jnp.swapaxes(scales, 1, 2))
    return out[:, :m]


def _transpose(scales, out):
    """In a kernel: a matrix of whole registers, one column of them at a time."""
    for start in range(0, scales.shape[1], lanes):
        part = slice(start, start + lanes)
        out[part, :] = scales[:, part].astype(jnp.float32).T
