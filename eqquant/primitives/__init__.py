"""JAX primitives of products: how they batch, differentiate and transpose, and which
kernel each platform lowers them to.

From here come `quantized_dot`, `rows_dot` and rounding with a straight-through
derivative. They work on raw arrays and know nothing of arrays in parts. This room
imports `kernels`, `formats` and `_jax`.
"""

from ._activations import straight_rounded as straight_rounded
from ._lowering import dot_by as dot_by, lowering_of as lowering_of
from ._quantized_dot import (
    quantized_dot as quantized_dot,
    quantized_dot_p as quantized_dot_p,
)
from ._rows_dot import rows_dot as rows_dot
