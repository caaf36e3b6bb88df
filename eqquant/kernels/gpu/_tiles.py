"""Products in any format and direction: decode a tile of the weight, and multiply.

Tiles are cut along the axis that is not contracted. Each yields a part of the
result, and no parts are added. There are as few tiles as possible, without a loop,
because a GPU launches two or three kernels per tile.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from ...formats import Format, num_bytes
from .._product import Product
from ._levels import levels, per_code
from ._parts import multiply, num_parts, split


# Bytes of a decoded tile. Large GPUs have L2 caches of at least 40 MB, from which the
# matmul that follows reads the tile.
_tile_bytes = 2**25
# The cost of kernel launches is negligible for larger tiles.
_most_tile_bytes = 2**26
# XLA compiles each tile separately, so larger weights have larger tiles.
_most_tiles = 16


def tile_size(size: int, each: int, multiple: int, room: int = 0) -> int:
    """Return the rows (or columns) of a weight in a tile.

    Tiles have about the same size, and there are at least two.

    **Arguments:**

    - `size`: rows of the weight.
    - `each`: bytes of a decoded row.
    - `multiple`: a divisor of the size of a tile.
    - `room`: bytes of the result, whose memory tiles may use. For many rows this may
        exceed the cache, but matmuls are then bound by compute, and there are fewer
        kernel launches.
    """
    room = min(room, _most_tile_bytes)
    most = max(_tile_bytes, room) // max(each, 1)
    most = max(most, -(-size // _most_tiles))
    count = max(-(-size // most), 2)
    return -(-size // (count * multiple)) * multiple


def dot(
    product: Product,
    operand: str,
    x: Shaped[Array, "m size"],
    codes: Shaped[Array, "rows packed"],
    scales: Float[Array, "rows blocks"],
) -> Float[Array, "m out"]:
    """Compute a product, by operands of dtype `operand`."""
    format, contract_rows = product.format, product.contract_rows
    rows, columns, blocks = product.rows, product.columns, product.blocks
    dtype, out_dtype = jnp.dtype(operand), product.out_dtype
    x_parts, w_parts = parts = num_parts(product)
    if dtype != jnp.bfloat16:
        x_parts, w_parts = 1, 1
    sums = jnp.int32 if dtype == jnp.int8 else jnp.float32
    scales = scales.astype(jnp.float32)
    # Integers are exact unscaled; scales multiply the activation or the result. For a
    # 16-bit result, scaling the weight instead saves a pass over the result.
    is_same_dtype = out_dtype == dtype
    late = product.has_integer_rows
    if is_same_dtype and parts == (1, 1) and dtype != jnp.int8:
        late = False
    each, room = dtype.itemsize * w_parts, 0
    if format.history:  # XLA writes states to memory.
        each += 4
    if is_same_dtype and not late and (x_parts, w_parts) == (1, 1):
        sums, room = dtype, x.shape[0] * dtype.itemsize
    if late and contract_rows:
        x = x.astype(jnp.float32) * scales[:, 0]

    if contract_rows:
        step = step_of(columns, blocks, format)
        size = tile_size(columns, rows * each, step, room * columns)
        total = columns
    else:
        # Multiples of the tiles of tensor cores.
        multiple = 128 if rows >= 1024 else 8 if rows > 8 else 1
        size = tile_size(rows, columns * each, multiple, room * rows)
        total = rows
    xs = split(x, dtype, x_parts)
    out, last = [], None
    for start in range(0, total, size):
        end = min(start + size, total)
        if last is not None:
            # Order tiles, so that one at a time is in memory. Otherwise XLA decodes
            # several in one kernel, or concatenates them for one matmul. The barrier
            # takes all codes, because it would copy slices.
            last, xs, codes = lax.optimization_barrier((last, xs, codes))
            out[-1] = last
        if contract_rows:
            span = slice(*(num_bytes(i, format.bits) for i in (start, end)))
            part = slice(None)
            if blocks > 1:
                part = slice(*(i * blocks // columns for i in (start, end)))
            tile = codes[:, span], scales[:, part]
        else:
            tile = codes[start:end], scales[start:end]
        ws = _decode(*tile, format, dtype, w_parts, scaled=not late)
        last = multiply(xs, ws, contract_rows, sums)
        out.append(last)
    whole = jnp.concatenate(out, 1) if len(out) > 1 else out[0]
    if late and not contract_rows:
        whole = whole.astype(jnp.float32) * scales[:, 0]
    return whole.astype(out_dtype)


def step_of(columns: int, blocks: int, format: Format) -> int:
    """Return the columns that are decoded together: whole blocks and whole groups."""
    return max(format.group, columns // blocks if blocks > 1 else 1)


def _decode(codes, scales, format: Format, dtype, parts: int, scaled: bool) -> list:
    """Decode a tile to logical order. Writing it in this order is free; permuting a
    large activation would take another pass."""
    logical = format.ordered_states(codes)
    if not scaled:
        return [levels(logical, format, dtype)]
    w = levels(logical, format, jnp.float32) * per_code(scales, logical.shape[1])
    return split(w, dtype, parts)
