"""How a mesh splits arrays and their products.

Exports `Plan`, the split of a weight; `Rule`, the roles of the axes of a product;
`partition_product`, which derives all specs and collectives of a product from its rule
and a plan; `plan_from_types` and `plan_for`, which find that plan; and functions that
keep arrays split on a mesh with explicit axes: `dense_dot`, `merge`, `split`,
`request`, `reshard_to` and `all_gather_scales`. Imports `_jax`.
"""

from ._all_gather_scales import all_gather_scales as all_gather_scales
from ._dense_dot import dense_dot as dense_dot
from ._explicit import (
    has_explicit_split as has_explicit_split,
    look_up as look_up,
    Request as Request,
    request_in_order as request_in_order,
    reshard_to as reshard_to,
    spec_like as spec_like,
    split_by_compiler as split_by_compiler,
)
from ._find import (
    plan_for as plan_for,
    plan_from_types as plan_from_types,
    result_type as result_type,
)
from ._merge import (
    merge as merge,
    Parts as Parts,
    parts_by_type as parts_by_type,
    split as split,
    split_by_type as split_by_type,
)
from ._plan import (
    aligned as aligned,
    Names as Names,
    names_of as names_of,
    Plan as Plan,
)
from ._request import request as request
from ._rule import (
    DOT as DOT,
    DOT_OVER_ROWS as DOT_OVER_ROWS,
    Partition as Partition,
    partition_product as partition_product,
    Rule as Rule,
    SCALE_GRADIENT as SCALE_GRADIENT,
)


__all__ = []
