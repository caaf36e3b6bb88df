"""Permute columns of activations to plane order, and columns of results back.

XLA would copy them through layouts whose last axis is at most half a register. For many
rows that takes half as long as the product.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped

from ...formats import Format
from ._loop import loop, part_of
from ._tiles import (
    chunk_bytes,
    from_tiles,
    lanes,
    look_up,
    pad_to,
    plane_group,
    planes_of,
    result_like,
    to_tiles,
)


def is_simple(format: Format) -> bool:
    """Return whether groups of codes end at register boundaries, in the codes and in
    the activation."""
    group = plane_group(format)
    whole = group <= lanes or group // planes_of(format) == lanes
    return whole and chunk_bytes(format) == lanes


def _swap(a, b, shift: int):
    """Swap every second run of `shift` lanes of `a` with the run before it in `b`."""
    lane = lax.broadcasted_iota(jnp.int32, a.shape, 1)
    upper = lax.rem(lax.div(lane, jnp.int32(shift)), jnp.int32(2)) == 1
    return (
        jnp.where(upper, pltpu.roll(b, shift, 1), a),
        jnp.where(upper, b, pltpu.roll(a, lanes - shift, 1)),
    )


def _shuffle(x, outer: int, inner: int, width: int):
    """Transpose lanes from `(outer, inner, width)` to `(inner, outer, width)`."""
    if outer == 1 or inner == 1:
        return x
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    i = lax.div(lane, jnp.int32(outer * width))
    j = lax.rem(lax.div(lane, jnp.int32(width)), jnp.int32(outer))
    source = (j * inner + i) * width + lax.rem(lane, jnp.int32(width))
    return look_up(x, source, 1)


def split_planes(
    x: Shaped[Array, "m columns"], format: Format
) -> list[Shaped[Array, "m 128"]]:
    """Split the columns for 128 bytes of codes into planes. `x` has 32-bit elements.

    This transposes registers and parts of registers, in `log2(planes)` steps.
    """
    planes = planes_of(format)
    parts = [x[:, i * lanes : (i + 1) * lanes] for i in range(planes)]
    group = plane_group(format)
    width = group // planes
    if width == lanes:
        return parts
    parts = [_shuffle(part, lanes // group, planes, width) for part in parts]
    return _transpose(parts)


def join_planes(parts: list, format: Format) -> Shaped[Array, "m columns"]:
    """Invert [`split_planes`][] and concatenate the columns."""
    planes = len(parts)
    group = plane_group(format)
    width = group // planes
    if width < lanes:
        parts = _transpose(parts)
        parts = [_shuffle(part, planes, lanes // group, width) for part in parts]
    return jnp.concatenate(parts, 1)


def _transpose(parts: list) -> list:
    """Swap the index of a register with the position of a part in the register."""
    parts, count = list(parts), len(parts)
    step = 1
    while step < count:
        for i in range(count):
            if not i & step:
                pair = _swap(parts[i], parts[i + step], lanes // count * step)
                parts[i], parts[i + step] = pair
        step *= 2
    return parts


def to_planes(x, format: Format, interpret: bool):
    """Permute columns to plane order within every `chunk_bytes` bytes of codes."""
    if format.bits == 8 or not is_simple(format):
        return to_tiles(x, chunk_bytes(format), format)
    return _permute(x, format, split_planes, "split_planes", interpret)


def from_planes(x, columns: int, format: Format, interpret: bool):
    """Invert [`to_planes`][] and keep the first `columns` columns."""
    if format.bits == 8 or not is_simple(format):
        return from_tiles(x, chunk_bytes(format), columns, format)

    def join(x, format):
        planes = planes_of(format)
        parts = [x[:, i * lanes : (i + 1) * lanes] for i in range(planes)]
        return [join_planes(parts, format)]

    return _permute(x, format, join, "join_planes", interpret)[..., :columns]


def arrange(x, out, format: Format, permute: Callable = split_planes):
    """Write the permuted columns of `x` to `out`, in a kernel."""
    packed = x.dtype.itemsize < 4  # Permute adjacent rows together, as 32 bits.
    size = lanes * planes_of(format)

    def permute_part(i, carry):
        part = part_of(x, 1, i, size)[...]
        part = pltpu.bitcast(part, jnp.int32) if packed else part
        part = jnp.concatenate(permute(part, format), 1)
        part_of(out, 1, i, size)[...] = (
            pltpu.bitcast(part, out.dtype) if packed else part
        )
        return carry

    registers = x.shape[0] * size * x.dtype.itemsize // 4096
    loop(x.shape[1] // size, permute_part, bundles=2 * registers)


def _permute(x, format: Format, permute, name: str, interpret: bool):
    """Run `permute` on tiles of an activation or a result."""
    size = lanes * planes_of(format)
    batch, m, _ = x.shape
    x = pad_to(x, 2, size)
    columns = x.shape[2]
    register = 32 // x.dtype.itemsize
    bm = min(math.ceil(m / register) * register, 256)
    bk = math.gcd(columns, 2048) // size * size or size
    bk = bk if columns % bk == 0 else size
    x = pad_to(x, 1, bm)

    def kernel(x, out):
        arrange(x.at[0], out.at[0], format, permute)

    spec = pl.BlockSpec((1, bm, bk), lambda b, i, k: (b, i, k))
    out = pl.pallas_call(
        kernel,
        grid=(batch, x.shape[1] // bm, columns // bk),
        in_specs=[spec],
        out_specs=spec,
        out_shape=result_like(x, x.shape[1], columns, x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel")
        ),
        interpret=interpret,
        name=name,
    )(x)
    return out[:, :m]
