"""Construction of quantized arrays from components."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, UInt8

from ..._jax import typed
from ...formats import as_format, Format, num_codes, problems_of, ShortScales
from ...kernels import as_compute, Compute
from .._matrices import canonical_axes
from ._array import QuantizedArray


@typed
def from_components(
    codes: UInt8[Array, "*lead packed"] | Int8[Array, "*lead packed"],
    scales: Float[Array, "*lead blocks"] | ShortScales,
    format: Format | str,
    *,
    dtype: Any = "float32",
    axis: int | Sequence[int] = -1,
    size: int | Sequence[int] | None = None,
    offsets: Float[Array, "*lead blocks"] | ShortScales | None = None,
    precision: str | None = None,
    activations: str | None = None,
    compute: Compute | None = None,
) -> QuantizedArray:
    """Make a quantized array from its components, for example from a checkpoint.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, "nf4")
        same = eqquant.arrays.from_components(q.codes, q.scales, "nf4")
        assert (same.dequantize() == q.dequantize()).all()
        ```

    **Arguments:**

    - `codes`: `(*lead, packed)`, packed as `format` packs them.
    - `scales`: `(*lead, blocks)`, of the `scale_dtype` of the format. Double
        quantization needs an [`eqquant.formats.QuantizedScales`][], MXFP4 an
        [`eqquant.formats.PowerOfTwoScales`][], and NVFP4 an
        [`eqquant.formats.Float8Scales`][]. `double_quantization="k"` needs an
        [`eqquant.formats.IntegerScales`][] or [`eqquant.formats.FourBitScales`][].
    - `format`: a format, or the name of one.
    - `dtype`: the dtype of the dequantized array.
    - `axis`: the blocked axis (or axes) of the dequantized array.
    - `size`: the length of the blocked axis, or a tuple of lengths. The default, for
        one axis, is the number of codes.
    - `offsets`: like `scales`, for an affine format. Double quantization needs an
        [`eqquant.formats.QuantizedOffsets`][], or the class of `scales` for `"k"`.
    - `precision`, `activations`, `compute`: as in [`eqquant.quantize`][].

    **Returns:**

    A [`eqquant.QuantizedArray`][].

    **Raises:**

    `TypeError` or `ValueError` if the components are inconsistent.
    """
    format = as_format(format, "from_components")
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"from_components: dtype must be floating point, got {dtype}.")
    count = 1 if isinstance(axis, int) else len(axis)
    axes = canonical_axes(axis, codes.ndim - 1 + count)
    held = num_codes(codes.shape[-1], format.bits)
    if size is None:
        if count > 1:
            raise ValueError("from_components: several axes need their sizes in size.")
        size = held
    sizes = (size,) if isinstance(size, int) else tuple(size)
    if len(sizes) != count:
        raise ValueError(
            f"from_components: size must give {count} sizes, one for each of axis, got "
            f"{size}."
        )
    total = math.prod(sizes)
    for problem in problems_of(format, codes, scales, offsets, size=total):
        raise type(problem)(f"from_components: {problem}")
    fields = format, dtype, axes, sizes[1:], held - total
    compute = as_compute(compute, precision, activations)
    return QuantizedArray(codes, scales, *fields, offsets=offsets, compute=compute)
