"""Integers with zero points, the affine layout of most libraries."""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..._jax import typed
from ...arrays import QuantizedArray
from ...formats import Int2, Int3, Int4, Int5, Int6, Int8
from ..files import to_numpy
from ..foreign import from_codes


_formats = {2: Int2, 3: Int3, 4: Int4, 5: Int5, 6: Int6, 8: Int8}


@typed
def quantize_with_zero_points(
    array: Float[Array, "*lead size"] | Float[np.ndarray, "*lead size"],
    bits: Literal[2, 3, 4, 5, 6, 8] = 4,
    *,
    block_size: int | None = 128,
) -> QuantizedArray:
    """Quantize an array to `(code - zero_point) * scale`, as GPTQ, AWQ and
    compressed-tensors store affine integers.

    The offsets of [`eqquant.Int4`][] with `affine=True` are any numbers, which is more
    accurate. Here they are whole multiples of the scale, so that those libraries can
    store them.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.checkpoints.quantize_with_zero_points(weight, 4)
        assert q.format == eqquant.Int4(block_size=128, affine=True)
        zeros = q.offsets / q.scales
        assert (zeros == zeros.round()).all()
        ```

    **Arguments:**

    - `array`: the blocks run along the last axis.
    - `bits`: the bits of a code.
    - `block_size`: the number of consecutive values that share a scale and a zero
        point; `None` for the whole axis. It must divide the axis.

    **Returns:**

    An array of the shape and dtype of `array`. The scale of a block is its range, which
    includes 0, over `2 ** bits - 1`, rounded to bfloat16.

    **Raises:**

    `ValueError` if the block size does not divide the axis, or if values are NaN or
    infinite.
    """
    values = np.asarray(to_numpy(array), np.float32)
    size, block = values.shape[-1], block_size or values.shape[-1]
    if not block or size % block:
        raise ValueError(
            f"quantize_with_zero_points: block_size must divide the last axis of "
            f"{size} values, got {block_size}. Choose another block_size."
        )
    if not np.all(np.isfinite(values)):
        raise ValueError(
            "quantize_with_zero_points: array must be finite, but has NaN or infinity. "
            "Remove these values first."
        )
    blocks = values.reshape(*values.shape[:-1], size // block, block)
    low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    highest = 2**bits - 1
    scales = ((high - low) / highest).astype(jnp.bfloat16).astype(np.float32)
    divisor = np.where(scales > 0, scales, 1)
    zeros = np.clip(np.round(-low / divisor), 0, highest)
    codes = np.round(blocks / divisor[..., None]) + zeros[..., None]
    codes = np.clip(codes, 0, highest).astype(np.uint8).reshape(values.shape)
    format = _formats[bits](
        block_size=block_size if block < size else None,
        scale_dtype="float32",
        affine=True,
        **{} if bits == 8 else {"fit": "absmax"},
    )
    return from_codes(codes, scales, -zeros * scales, format, array.dtype)
