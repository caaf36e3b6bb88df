"""Save trees to files, and load them.

Exports `save`, `load`, `load_metadata`, `load_quantized`, `quantize_checkpoint` and
`describe_checkpoint`; `read_checkpoint` and `write_bitsandbytes` for files of other
libraries; and `main`, the command line. Imports `trees`, `arrays`, `kernels`, `formats`
and `_jax`.

Public functions are in this folder. They import `foreign/` and `leaves/`, which are
independent of each other and import `files/`.
"""

from ._command import main as main
from ._convert import quantize_checkpoint as quantize_checkpoint
from ._describe import (
    describe_checkpoint as describe_checkpoint,
    Description as Description,
    StoredTensor as StoredTensor,
)
from ._load import load as load, load_metadata as load_metadata
from ._load_quantized import load_quantized as load_quantized
from ._save import save as save
from .foreign import (
    read_checkpoint as read_checkpoint,
    write_bitsandbytes as write_bitsandbytes,
)


__all__ = [
    "describe_checkpoint",
    "Description",
    "load",
    "load_metadata",
    "load_quantized",
    "quantize_checkpoint",
    "read_checkpoint",
    "save",
    "StoredTensor",
    "write_bitsandbytes",
]
