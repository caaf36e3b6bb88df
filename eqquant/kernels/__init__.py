"""Numerics only, in a folder for each platform.

Exports `xla`, `cpu`, `gpu` and `tpu`, and `round_int8` for activations. Each platform
has a `dot` of the same signature. The one of `xla` is the reference, and serves where
the others do not. Kernels know formats, but neither arrays nor derivatives. Imports
`formats` and `_jax`.
"""

from ..formats import GPUKernel as GPUKernel, TPUKernel as TPUKernel
from . import cpu as cpu, gpu as gpu, tpu as tpu, xla as xla
from ._int8 import round_int8 as round_int8


__all__ = [
    "GPUKernel",
    "TPUKernel",
]
