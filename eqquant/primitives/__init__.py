"""JAX primitives: how products batch, differentiate and transpose, and their kernels.

Exports `quantized_dot`, `rows_dot`, `codes_dot`, `observe_rows`, `observe_product`,
`straight_rounded` and `hadamard`, which work on raw arrays, and `hadamard_by_products`,
which computes the same by XLA; `implementation_on`, the kernel of a product as a
function; `lowering_of` and `lowering_of_codes`, the same in words; `unflatten`, which
reads the operands of `quantized_dot`; and `map_all_first`, for batching rules. Imports
`partition`, `kernels`, `formats` and `_jax`.
"""

from . import _checkpoint
from ._activations import straight_rounded
from ._batching import map_all_first
from ._codes_dot import codes_dot, codes_dot_p, lowering_of_codes
from ._hadamard import hadamard, hadamard_by_products
from ._lowering import dot_by, implementation_on, lowering_of
from ._observe_rows import observe_product, observe_rows, sums_of_rows
from ._operands import unflatten
from ._quantized_dot import quantized_dot, quantized_dot_p
from ._rows_dot import rows_dot
from ._scale_gradient import scale_gradient_p


__all__ = ["quantized_dot"]
