"""Checkpoints: trees in files, and files into trees.

Exports `save`, `load` and `load_quantized`. Imports `trees`, `arrays`, `formats` and
`_jax`.
"""

from ._load import load as load, load_metadata as load_metadata
from ._quantized import load_quantized as load_quantized
from ._save import save as save
