"""Numerics only, in a folder for each platform.

Exports `xla` and `cpu`; `Compute`, the settings of a product, with its parts
`TPUKernel` and `GPUKernel`; and `round_int8` for activations. Each platform has a `dot`
of the same signature. The `dot` of `xla` is the reference, and serves products that no
other kernel supports. Kernels use formats, but neither arrays nor derivatives. Imports
`formats` and `_jax`.

`gpu` and `tpu` are imported on first use, because Pallas takes long to import.
"""

from . import cpu, xla
from ._compute import Activations, as_compute, Compute, GPUKernel, Precision, TPUKernel
from ._int8 import round_int8
from ._int8_sums import gpu_sums_int8, longest_int8_sum
from ._product import choose, Kernel, Matmul, Product, table, View


__all__ = ["Compute", "GPUKernel", "TPUKernel"]
