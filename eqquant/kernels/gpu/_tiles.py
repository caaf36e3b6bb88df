"""Any format and direction: a tile of the weight is decoded, and multiplied.

Tiles are cut along the axis that is not contracted, so that each gives a part of the
result, and nothing is added up. There are as few of them as there can be, without a
loop: a GPU starts two or three kernels for each.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from ...formats import (
    Format,
    from_plane_order,
    num_bytes,
    num_codes,
    unpack_planes,
)
from ._levels import levels, per_code
from ._parts import is_exact, multiply, split


# Of a decoded tile. The caches of large GPUs hold 40 MB or more: a tile of this size is
# read from there by the product that follows.
_tile_bytes = 2**25
# Beyond, what it costs to start kernels is little beside all else.
_most_tile_bytes = 2**26
# Each is compiled by itself. Of a larger weight tiles are larger.
_most_tiles = 16


def tile_size(size: int, each: int, multiple: int, room: int = 0) -> int:
    """How many rows (or columns) of a weight, of so many bytes each, are in a tile:
    about as many in each, and never all of them if there are several. There is `room`
    for so many bytes where the result will be. Of many rows that is more than a cache
    holds, but their products do not wait for memory, and fewer kernels are started."""
    room = min(room, _most_tile_bytes)
    most = max(_tile_bytes, room) // max(each, 1)
    most = max(most, -(-size // _most_tiles))
    count = max(-(-size // most), 2)
    return -(-size // (count * multiple)) * multiple


def dot(
    x: Shaped[Array, "m size"],
    codes: Shaped[Array, "rows packed"],
    scales: Float[Array, "rows blocks"],
    *,
    format: Format,
    contract_rows: bool,
    operand: str,
    parts: tuple[int, int],
    out_dtype,
) -> Float[Array, "m out"]:
    """`x @ w.T`, or `x @ w`."""
    bits = format.bits
    rows, packed = codes.shape
    columns, blocks = num_codes(packed, bits), scales.shape[1]
    dtype = jnp.dtype(operand)
    of_x, of_weight = parts if dtype == jnp.bfloat16 else (1, 1)
    sums = jnp.int32 if dtype == jnp.int8 else jnp.float32
    scales = scales.astype(jnp.float32)
    # Integers are exact as they are, and what they are multiplied with, or the result,
    # is scaled. But a result in 16 bits needs no other pass if the weight is.
    as_wide = jnp.dtype(out_dtype) == dtype
    exact = is_exact(blocks, format)
    late = exact and not (as_wide and parts == (1, 1) and dtype != jnp.int8)
    each, room = dtype.itemsize * of_weight, 0
    if as_wide and not late and (of_x, of_weight) == (1, 1):
        sums, room = dtype, x.shape[0] * dtype.itemsize
    if late and contract_rows:
        x = x.astype(jnp.float32) * scales[:, 0]

    if contract_rows:
        step = step_of(columns, blocks, format)
        size = tile_size(columns, rows * each, step, room * columns)
        total = columns
    else:
        # What tensor cores multiply at once is even better filled.
        multiple = 128 if rows >= 1024 else 8 if rows > 8 else 1
        size = tile_size(rows, columns * each, multiple, room * rows)
        total = rows
    xs = split(x, dtype, of_x)
    out, last = [], None
    for start in range(0, total, size):
        end = min(start + size, total)
        if last is not None:
            # After the last one is done, so that one tile at a time is in memory: XLA
            # would decode several in one kernel, or put them together again for one
            # product. The codes are whole here, as parts would be copied.
            last, xs, codes = lax.optimization_barrier((last, xs, codes))
            out[-1] = last
        if contract_rows:
            span = slice(num_bytes(start, bits), num_bytes(end, bits))
            part = (
                slice(None)
                if blocks == 1
                else slice(start * blocks // columns, end * blocks // columns)
            )
            tile = codes[:, span], scales[:, part]
        else:
            tile = codes[start:end], scales[start:end]
        ws = _decode(*tile, format, dtype, of_weight, scaled=not late)
        last = multiply(xs, ws, contract_rows, sums)
        out.append(last)
    whole = jnp.concatenate(out, 1) if len(out) > 1 else out[0]
    if late and not contract_rows:
        whole = whole.astype(jnp.float32) * scales[:, 0]
    return whole.astype(out_dtype)


def step_of(columns: int, blocks: int, format: Format) -> int:
    """So many columns of a weight are decoded together: whole blocks, whole groups."""
    return max(format.group, columns // blocks if blocks > 1 else 1)


def _decode(codes, scales, format: Format, dtype, parts: int, scaled: bool) -> list:
    """A tile, in logical order: that costs nothing where it is written, but another
    pass over a large activation."""
    planes = unpack_planes(codes, format.bits, format.group)
    planes = planes.reshape(codes.shape[0], -1)
    logical = from_plane_order(planes, format.bits, format.group)
    if not scaled:
        return [levels(logical, format, dtype)]
    w = levels(logical, format, jnp.float32) * per_code(scales, logical.shape[1])
    return split(w, dtype, parts)
