"""Dense products, whose operands may be explicitly split over a mesh."""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from .._jax import has_explicit_axes, mapped_mesh_axes, spec_of
from ._plan import Names, names_of
from ._request import names_in_product


def dense_dot(
    x: Any,
    w: Any,
    numbers: Any,
    *,
    weight_first: bool = False,
    out_sharding: PartitionSpec | None = None,
    **how,
) -> Any:
    """`lax.dot_general(x, w, numbers, **how)`, or of the two in the other order.

    On a mesh with explicit axes JAX refuses factors that are split alike where they are
    summed over, and those that are not split alike. Here `x` keeps what its free axes
    are split by. A weight that is split over these, too, is gathered, and results are
    summed. `out_sharding` may ask for a result that is split otherwise.
    """
    if has_explicit_axes():
        x, w, spec = _aligned(x, w, numbers, weight_first, out_sharding)
        how |= {} if spec is None else {"out_sharding": spec}
    if weight_first:
        x, w, numbers = w, x, [tuple(reversed(pair)) for pair in numbers]
    return lax.dot_general(x, w, numbers, **how)


def _aligned(
    x: Any, w: Any, numbers: Any, weight_first: bool, asked: PartitionSpec | None
) -> tuple:
    """Operands, and how the result is split; None if nothing is."""
    (over_x, over_w), (batch_x, batch_w) = numbers
    of_x, of_w = ([*map(names_of, spec_of(a))] for a in (x, w))
    if not any((*of_x, *of_w)):
        return x, w, asked
    free_x = [i for i in range(x.ndim) if i not in {*over_x, *batch_x}]
    free_w = [i for i in range(w.ndim) if i not in {*over_w, *batch_w}]
    if asked is not None:
        wanted = [*map(names_of, asked), *[()] * x.ndim][len(batch_x) :]
        of_weight = {name for names in of_w for name in names}
        left = names_in_product([of_x[i] for i in free_x], wanted, of_weight)
        for i, names in zip(free_x, left, strict=True):
            of_x[i] = names
    taken = {name for i in (*free_x, *batch_x) for name in of_x[i]}
    taken |= mapped_mesh_axes()
    of_w = [tuple(name for name in names if name not in taken) for names in of_w]
    for i, j in zip(batch_x, batch_w, strict=True):
        of_w[j] = of_x[i]
    for i, j in zip(over_x, over_w, strict=True):
        of_x[i] = of_w[j]
    of_free_x, of_free_w = [of_x[i] for i in free_x], [of_w[i] for i in free_w]
    first, second = of_free_x, of_free_w
    if weight_first:
        first, second = second, first
    out = [*(of_x[i] for i in batch_x), *first, *second]
    x, w = (
        jax.sharding.reshard(a, _spec(names)) for a, names in ((x, of_x), (w, of_w))
    )
    return x, w, _spec(out) if asked is None else asked


def _spec(axes: list[Names]) -> PartitionSpec:
    return PartitionSpec(*(names or None for names in axes))
