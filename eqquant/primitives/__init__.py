"""JAX primitives: how products batch, differentiate and transpose, and their kernels.

Exports `quantized_dot`, `rows_dot`, `observe_rows` and `straight_rounded`, which work
on raw arrays; `implementation_on` and `lowering_of`, the kernel of a product as a
function and in words; `Plan`, the split of a weight over a mesh; `request` and
`reshard_to` for results with a requested sharding; and `merge` and `split` for axes
that are split. Imports `kernels`, `formats` and `_jax`.
"""

from ._activations import straight_rounded as straight_rounded
from ._all_gather_scales import all_gather_scales as all_gather_scales
from ._dense_dot import dense_dot as dense_dot
from ._lowering import (
    dot_by as dot_by,
    implementation_on as implementation_on,
    lowering_of as lowering_of,
)
from ._merge import (
    merge as merge,
    Parts as Parts,
    parts_by_type as parts_by_type,
    split as split,
    split_by_type as split_by_type,
)
from ._observe_rows import observe_rows as observe_rows, sums_of_rows as sums_of_rows
from ._plan import aligned as aligned, names_of as names_of, Plan as Plan
from ._quantized_dot import (
    quantized_dot as quantized_dot,
    quantized_dot_p as quantized_dot_p,
)
from ._request import request as request, reshard_to as reshard_to
from ._rows_dot import rows_dot as rows_dot
from ._scale_gradient import scale_gradient_p as scale_gradient_p


__all__ = [
    "quantized_dot",
]
