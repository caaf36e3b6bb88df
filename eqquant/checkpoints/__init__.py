"""Save trees to files, and load them.

Exports `save`, `load`, `load_metadata`, `load_quantized`, `quantize_checkpoint`,
`convert_checkpoint` and `describe_checkpoint`; `read_checkpoint` and writers for files
of other libraries; and `main`, the command line. Imports `trees`, `arrays`, `kernels`,
`formats` and `_jax`.

Public functions are in this folder and in `writers/`, which imports `foreign/` and
`leaves/`. These two are independent of each other and import `files/`.
"""

from ._command import main
from ._convert import quantize_checkpoint
from ._convert_to import Conversion, convert_checkpoint, Converted
from ._describe import describe_checkpoint, Description, StoredTensor
from ._layout import Concatenated
from ._load import load, load_metadata
from ._load_quantized import load_quantized
from ._save import save
from .foreign import read_checkpoint
from .writers import (
    quantize_in_tiles,
    quantize_with_zero_points,
    write_bitsandbytes,
    write_compressed_tensors,
    write_gguf,
    write_gptq,
    write_mlx,
)


__all__ = [
    "Concatenated",
    "Conversion",
    "convert_checkpoint",
    "Converted",
    "describe_checkpoint",
    "Description",
    "load",
    "load_metadata",
    "load_quantized",
    "quantize_checkpoint",
    "quantize_in_tiles",
    "quantize_with_zero_points",
    "read_checkpoint",
    "save",
    "StoredTensor",
    "write_bitsandbytes",
    "write_compressed_tensors",
    "write_gguf",
    "write_gptq",
    "write_mlx",
]
