"""The quantized array: its structure, its products, and quantization."""

from ._array import (
    QuantizedArray as QuantizedArray,
    without_unsaved as without_unsaved,
)
from ._axes import canonical_axes as canonical_axes
from ._components import from_components as from_components
from ._encode import in_blocks as in_blocks
from ._quantize import (
    encode as encode,
    no_problem as no_problem,
    quantize as quantize,
)
