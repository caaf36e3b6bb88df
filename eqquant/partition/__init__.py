"""How a mesh splits arrays and their products.

Exports `Plan`, the split of a weight; `Rule`, the roles of the axes of a product;
`partition_product`, which derives all specs and collectives of a product from its rule
and a plan; `plan_from_types` and `plan_for`, which find that plan; and functions that
keep arrays split on a mesh with explicit axes: `dense_dot`, `merge`, `split`,
`request`, `reshard_to` and `all_gather_scales`. Imports `_jax`.
"""

from ._all_gather_scales import all_gather_scales
from ._dense_dot import dense_dot
from ._explicit import (
    has_explicit_split,
    look_up,
    Request,
    request_in_order,
    reshard_to,
    spec_like,
    split_by_compiler,
)
from ._find import plan_for, plan_from_types, result_type
from ._merge import merge, merge_moves, Parts, parts_by_type, split, split_by_type
from ._plan import aligned, Names, names_of, Plan
from ._request import request
from ._rule import (
    DOT,
    DOT_OVER_ROWS,
    Partition,
    partition_product,
    Rule,
    SCALE_GRADIENT,
)


__all__ = []
