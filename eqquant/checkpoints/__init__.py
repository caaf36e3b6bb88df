"""Checkpoints: trees in files, and files into trees.

Exports `save`, `load`, `load_metadata`, `load_quantized`, `quantize_checkpoint`, and
`main`, the command line. Imports `trees`, `arrays`, `formats` and `_jax`.
"""

from ._command import main as main
from ._convert import quantize_checkpoint as quantize_checkpoint
from ._load import load as load, load_metadata as load_metadata
from ._quantized import load_quantized as load_quantized
from ._save import save as save
