"""Products with a weight that is decoded one tile of rows at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from ..._jax import match_varying, pipeline
from ...formats import Format


# The size of a decoded tile. Larger tiles leave the caches, and smaller ones leave
# threads idle.
_tile_bytes = 2**22
# The size up to which an int8 weight is decoded at once, because two tiles take longer
# to compile.
_small_bytes = 2**18


def tile_rows(rows: int, row_bytes: int) -> int:
    """Return the number of rows of a tile, which is less than `rows` if possible."""
    most = max(8, _tile_bytes // max(row_bytes, 1) // 8 * 8)
    return max(1, min(most, -(-rows // 2)))


def tiled(
    x: Shaped[Array, "m size"],
    codes: Shaped[Array, "rows packed"],
    scales: Float[Array, "rows blocks"],
    decode: Callable,
    use: Callable,
    contract_rows: bool,
    dtype,
) -> Shaped[Array, "m out"]:
    """Compute a product tile by tile. `decode(codes, scales)` decodes some rows to a
    tile, and `use(x, tile)` multiplies by it."""
    rows, _ = codes.shape
    whole = jax.eval_shape(decode, codes, scales)
    columns = whole.size // rows
    is_small = whole.dtype == jnp.int8 and whole.size <= _small_bytes
    height = rows if is_small else tile_rows(rows, columns * whole.dtype.itemsize)
    count, rest = divmod(rows, height)
    m = x.shape[0]
    is_thin = isinstance(m, int) and m <= 8  # Otherwise `m` may be symbolic.

    def rows_of(a, i, axis=0, size=height):
        return lax.dynamic_slice_in_dim(a, i * height, size, axis)

    def decoded(i, size=height):
        return decode(rows_of(codes, i, size=size), rows_of(scales, i, size=size))

    def add(i, tile, out, size=height):
        tile = tile.reshape(size, -1)
        if contract_rows:
            return out + use(rows_of(x, i, axis=1, size=size), tile)
        # The result is transposed while it is assembled, so that the results of a tile
        # are contiguous. For large m, the transposition would cost more.
        if is_thin:
            return lax.dynamic_update_slice_in_dim(out, use(x, tile).T, i * height, 0)
        return lax.dynamic_update_slice_in_dim(out, use(x, tile), i * height, 1)

    shape = (m, columns) if contract_rows else (rows, m) if is_thin else (m, rows)
    out, _, _, _ = match_varying(jnp.zeros(shape, dtype), x, codes, scales)

    out = pipeline(count, decoded, add, out)
    if rest:
        out = add(count, decoded(count, size=rest), out, size=rest)
    return out.T if not contract_rows and is_thin else out


def decode_tile(
    codes: Shaped[Array, "rows packed"],
    scales: Float[Array, "rows blocks"],
    format: Format,
    dtype,
) -> Float[Array, "rows planes blocks bytes"]:
    """Decode a tile in plane order. The result keeps its axes, because XLA would fuse a
    reshape into the decoding, and would not vectorise it."""
    blocks = scales.shape[-1]
    levels = format.levels(format.states(codes), dtype)
    levels = levels.reshape(*levels.shape[:2], blocks, levels.shape[2] // blocks)
    return levels * scales.astype(dtype)[:, None, :, None]
