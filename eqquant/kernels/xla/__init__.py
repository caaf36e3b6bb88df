"""Products with quantized weights in plain XLA, for any platform."""

from .._int8 import round_int8
from .._product import choose, Matmul
from ._recipes import FLOAT_KERNELS as FLOAT_KERNELS, KERNELS
from ._scale_gradient import scale_gradient


def dot(x, codes, scales, matmul: Matmul, x_unit=None):
    """Compute a product by the first of [`KERNELS`][] that serves it."""
    product = matmul.of(x, codes, scales)
    kernel = choose(KERNELS, product)
    assert not isinstance(kernel, str)
    return kernel.lower(product, x, codes, scales, x_unit)
