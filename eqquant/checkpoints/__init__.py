"""Checkpoints: trees in files, and files into trees.

Exports `load_quantized` and `read_checkpoint`. Imports `trees`, `arrays`, `formats` and `_jax`.
"""

from ._foreign import read_checkpoint as read_checkpoint
from ._quantized import load_quantized as load_quantized
