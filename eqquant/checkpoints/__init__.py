"""Checkpoints: trees in files, and files into trees.

Exports `save`, `load` and `load_quantized`; and `read_checkpoint` and
`write_bitsandbytes`, for files of other libraries. Imports `trees`, `arrays`, `formats`
and `_jax`.
"""

from ._bitsandbytes_write import write_bitsandbytes as write_bitsandbytes
from ._foreign import read_checkpoint as read_checkpoint
from ._load import load as load, load_metadata as load_metadata
from ._quantized import load_quantized as load_quantized
from ._save import save as save
