"""FP8 with one scale per tile of 128 rows and 128 columns, like DeepSeek."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..._jax import typed
from ...arrays import quantize, QuantizedArray
from ...formats import float_scales, FP8


TILE = 128


@typed
def quantize_in_tiles(
    array: Float[Array, "*lead rows columns"] | Float[np.ndarray, "*lead rows columns"],
) -> QuantizedArray:
    """Quantize matrices to FP8 with one scale per tile of 128 rows and 128 columns, as
    vLLM and DeepSeek store it.

    [`eqquant.FP8`][] with `block_size=128` has a scale for each row of a tile, which is
    more accurate. Here the rows of a tile have equal scales, so that
    [`eqquant.checkpoints.write_compressed_tensors`][] can write them once.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (256, 384))
        q = eqquant.checkpoints.quantize_in_tiles(weight)
        assert q.format == eqquant.FP8(block_size=128)
        assert (q.scales[:128] == q.scales[0]).all()
        ```

    **Arguments:**

    - `array`: the tiles lie in the last two axes. The last tile of an axis may have
        fewer rows or columns.

    **Returns:**

    An array of the shape and dtype of `array`. The scale of a tile is its largest
    magnitude over 448, or 1 if all values are 0.

    **Raises:**

    `TypeError` if the array has fewer than two axes, and the errors of
    [`eqquant.quantize`][].
    """
    format = FP8(block_size=TILE)
    scales = float_scales(quantize(array, format).scales)
    *lead, rows, blocks = scales.shape
    padding = [(0, 0)] * len(lead) + [(0, -rows % TILE), (0, 0)]
    tiles = jnp.pad(scales, padding).reshape(*lead, -1, TILE, blocks).max(-2)
    tiles = jnp.where(tiles > 0, tiles, 1)  # In tiles of zeros, all codes are 0.
    scales = jnp.repeat(tiles, TILE, axis=-2)[..., :rows, :]
    return quantize(array, format, scales=scales)
