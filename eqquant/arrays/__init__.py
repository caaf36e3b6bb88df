"""Arrays stored in parts: codes and scales, or a weight and its adapter.

Exports `ImplicitArray`, the interface for the folders above; its subclasses; functions
that quantize and dequantize; and `materialise`, the only function that decodes a whole
array. Imports `primitives`, `partition`, `kernels`, `formats`
and `_jax`.
"""

from ._axes import (
    Axes as Axes,
    Cut as Cut,
    Gather as Gather,
    Operation as Operation,
    Role as Role,
)
from ._cached import CachedArray as CachedArray
from ._contraction import Contraction
from ._hadamard import (
    hadamard as hadamard,
    hadamard_block as hadamard_block,
    rotated as rotated,
)
from ._implicit import (
    ImplicitArray as ImplicitArray,
    is_implicit as is_implicit,
    stored as stored,
    stored_classes as stored_classes,
)
from ._materialise import (
    materialise as materialise,
    MaterialiseError as MaterialiseError,
    MaterialiseWarning as MaterialiseWarning,
    OnMaterialise as OnMaterialise,
)
from ._matrices import (
    canonical_axes as canonical_axes,
    inverse_order as inverse_order,
    MatrixAxes as MatrixAxes,
    other_axes as other_axes,
)
from ._operators import (
    ArrayOperators as ArrayOperators,
    UnsupportedError as UnsupportedError,
)
from ._plain import contract as contract, scaled as scaled, with_shape as with_shape
from ._rotated import (
    dequantize as dequantize,
    is_quantized as is_quantized,
    RotatedArray as RotatedArray,
)
from ._slots import last_tokens as last_tokens
from ._views import as_views as as_views, exposed as exposed, restored as restored
from .lora import LoraArray as LoraArray
from .quantized import (
    encode as encode,
    from_components as from_components,
    in_blocks as in_blocks,
    no_problem as no_problem,
    quantize as quantize,
    quantized_arrays as quantized_arrays,
    QuantizedArray as QuantizedArray,
    replace_quantized as replace_quantized,
    without_unsaved as without_unsaved,
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
