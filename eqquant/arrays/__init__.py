"""Arrays stored in parts: codes and scales, or a weight and its adapter.

Exports `ImplicitArray`, the interface for the folders above; its subclasses; functions
that quantize and dequantize; and `materialise`, the only function that decodes a whole
array. Imports `primitives`, `partition`, `kernels`, `formats`
and `_jax`.
"""

from ._axes import Axes, Cut, Gather, Operation, Role
from ._boundary import Boundary, PassedArray
from ._cached import CachedArray
from ._contraction import Contraction
from ._hadamard import check_rotation, hadamard, hadamard_block, rotated
from ._implicit import ImplicitArray, is_implicit, stored, stored_classes
from ._materialise import (
    materialise,
    MaterialiseError,
    MaterialiseWarning,
    OnMaterialise,
)
from ._matrices import canonical_axes, inverse_order, MatrixAxes, other_axes
from ._operators import ArrayOperators, UnsupportedError
from ._plain import contract, scaled, with_shape
from ._rotated import dequantize, is_quantized, RotatedArray
from ._slots import last_tokens
from ._views import (
    as_views,
    exposed,
    restored,
    with_stacks,
    without_origins,
    without_views,
)
from .lora import LoraArray
from .quantized import (
    encode,
    from_components,
    in_blocks,
    no_problem,
    quantize,
    quantized_arrays,
    QuantizedArray,
    replace_quantized,
    without_unsaved,
)


__all__ = [
    "CachedArray",
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
