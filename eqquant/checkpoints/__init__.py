"""Checkpoints: trees in files, and files into trees.

Exports `load_quantized`. Imports `trees`, `arrays`, `formats` and `_jax`.
"""

from ._quantized import load_quantized as load_quantized
