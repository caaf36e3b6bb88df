"""Arrays stored in parts: codes and scales, or a weight and its adapter.

Exports `ImplicitArray`, the interface for the folders above; its subclasses; functions
that quantize and dequantize; and `materialise`, the only function that decodes a whole
array. Imports `primitives`, `partition`, `kernels`, `formats`
and `_jax`.
"""

from ._hadamard import (
    hadamard as hadamard,
    hadamard_block as hadamard_block,
    rotated as rotated,
)
from ._implicit import ImplicitArray as ImplicitArray, is_implicit as is_implicit
from ._materialise import (
    materialise as materialise,
    MaterialiseError as MaterialiseError,
    MaterialiseWarning as MaterialiseWarning,
    OnMaterialise as OnMaterialise,
)
from ._operators import UnsupportedError as UnsupportedError
from ._plain import contract as contract, with_shape as with_shape
from ._rotated import (
    dequantize as dequantize,
    is_quantized as is_quantized,
    RotatedArray as RotatedArray,
)
from ._straight_through import (
    straight_through_value as straight_through_value,
    StraightThroughArray as StraightThroughArray,
)
from .lora import LoraArray as LoraArray
from .observed import Observed as Observed, ObservedArray as ObservedArray
from .quantized import (
    canonical_axes as canonical_axes,
    encode as encode,
    from_components as from_components,
    in_blocks as in_blocks,
    no_problem as no_problem,
    quantize as quantize,
    QuantizedArray as QuantizedArray,
    without_unsaved as without_unsaved,
)


__all__ = [
    "dequantize",
    "from_components",
    "is_quantized",
    "LoraArray",
    "MaterialiseError",
    "MaterialiseWarning",
    "quantize",
    "QuantizedArray",
    "RotatedArray",
    "UnsupportedError",
]
