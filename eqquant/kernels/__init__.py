"""Numerics only, in a folder for each platform.

Exports `xla` and `cpu`; `Compute`, the settings of a product, with its parts
`TPUKernel` and `GPUKernel`; and `round_int8` for activations. Each platform has a `dot`
of the same signature. The `dot` of `xla` is the reference, and serves products that no
other kernel supports. Kernels use formats, but neither arrays nor derivatives. Imports
`formats` and `_jax`.

`gpu` and `tpu` are imported on first use, because Pallas takes long to import.
"""

from . import cpu as cpu, xla as xla
from ._compute import (
    Activations as Activations,
    as_compute as as_compute,
    Compute as Compute,
    GPUKernel as GPUKernel,
    Precision as Precision,
    TPUKernel as TPUKernel,
)
from ._int8 import round_int8 as round_int8
from ._product import (
    choose as choose,
    Kernel as Kernel,
    Matmul as Matmul,
    Product as Product,
    table as table,
    View as View,
)


__all__ = [
    "Compute",
    "GPUKernel",
    "TPUKernel",
]
