"""Products with quantized weights on GPUs.

On known chips, a kernel of Pallas and Triton decodes codes into registers, and
multiplies them with tensor cores. int8 codes are multiplied as integers. For many rows
on Hopper, a kernel of Mosaic decodes while tensor cores multiply. XLA computes all
other products, and exported ones, in the ways of `PORTABLE`.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from .._int8 import rounding
from .._product import Kernel, Product
from ._chips import matrix_units
from ._choose import bits_kept, choose
from ._kernel import TensorCoreKernel
from ._lookup import decoding_of
from ._portable import KERNELS as _PORTABLE, why_nothing


@dataclasses.dataclass(frozen=True)
class PallasKernel(Kernel):
    """A kernel of Pallas for NVIDIA GPUs, by the name of its compiler."""

    name: Literal["Mosaic", "Triton"]
    when: str
    rounding: str = "like the variants of XLA for GPUs"
    error: str = "5e-6 to 3e-3"

    def why_not(self, product):
        if reason := why_nothing(product):
            return reason
        kernel = choose(product)
        if isinstance(kernel, str):
            return kernel
        return None if kernel.by == self.name else f"{kernel.by} is faster"

    reads_views = True

    def lower(self, product, x, codes, scales, x_unit=None, interpret=False, view=None):
        stacks = {}
        if view is not None:
            stacks["index"] = view.flat_index
            stacks["stacked_scales"] = view.scales is not None
            codes, scales = view.codes, scales if view.scales is None else view.scales
        arrays = (x, codes, scales) if x_unit is None else (x, codes, scales, x_unit)
        flat = [a.reshape(-1, *a.shape[-2:]) for a in arrays]
        out = _chosen(product).dot(product, *flat, interpret=interpret, **stacks)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    def scale_dtype(self, product):
        """Return the dtype of the operands, if scales multiply the weight in it. The
        kernel that decodes the scales then writes half of the bytes."""
        kernel = _chosen(product)
        if kernel.scales_weights:
            return jnp.dtype(kernel.operand)
        return super().scale_dtype(product)

    def describe(self, product):
        kernel = _chosen(product)
        rounded = rounding(product.x, bits_kept(kernel, product))
        scaled = " and scaled" if kernel.scales_weights else ""
        name = f"{kernel.by} kernel for {kernel.chip}, {kernel.name}"
        return f"{name} {rounded}, {decoding_of(product.format)}{scaled}"


def _chosen(product: Product) -> TensorCoreKernel:
    kernel = choose(product)
    assert not isinstance(kernel, str), kernel
    return kernel


PORTABLE = _PORTABLE
# The first kernel that serves a product computes it.
KERNELS = (
    PallasKernel("Mosaic", "more than 64 rows in `x @ w.T` on an H100 or H200"),
    PallasKernel("Triton", "up to 64 or 128 rows; more rows on GeForce RTX 30 and 40"),
)
