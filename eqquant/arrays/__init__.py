"""Arrays in parts, which are never there as such.

From here come `ImplicitArray`, the interface that everything above knows; what is one:
quantized arrays, weights with an adapter, straight-through weights; how they are made;
and the one way to decode them in full. This room imports `primitives`, `kernels`,
`formats` and `_jax`.
"""

from ._implicit import ImplicitArray as ImplicitArray, is_implicit as is_implicit
from ._materialise import (
    materialise as materialise,
    MaterialiseError as MaterialiseError,
    MaterialiseWarning as MaterialiseWarning,
    OnMaterialise as OnMaterialise,
)
from ._plain import contract as contract, with_shape as with_shape
from ._straight_through import (
    straight_through_value as straight_through_value,
    StraightThroughArray as StraightThroughArray,
)
from .lora import LoraArray as LoraArray
from .quantized import (
    dequantize as dequantize,
    encode as encode,
    from_components as from_components,
    is_quantized as is_quantized,
    no_problem as no_problem,
    quantize as quantize,
    QuantizedArray as QuantizedArray,
)
