"""The quantized array: its structure, its products, and quantization."""

from ._array import quantized_arrays, QuantizedArray, replace_quantized, without_unsaved
from ._components import from_components
from ._encode import in_blocks
from ._quantize import encode, no_problem, quantize
