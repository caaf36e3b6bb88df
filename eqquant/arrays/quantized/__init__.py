"""The quantized array: its structure, its products, and quantization."""

from ._array import (
    quantized_arrays as quantized_arrays,
    QuantizedArray as QuantizedArray,
    replace_quantized as replace_quantized,
    without_unsaved as without_unsaved,
)
from ._components import from_components as from_components
from ._encode import in_blocks as in_blocks
from ._quantize import (
    encode as encode,
    no_problem as no_problem,
    quantize as quantize,
)
