"""Dense products, also on meshes with explicit axes."""

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
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Any:
    """Compute `lax.dot_general` of `x` and `w`, or of `w` and `x` with `weight_first`.

    On a mesh with explicit axes, JAX rejects operands whose contracted axes are split,
    and operands with different splits. Here, the free axes of `x` keep their split. A
    weight that is split over the same mesh axes is gathered, and results are summed.
    `out_sharding` requests another sharding of the result.
    """
    if has_explicit_axes():
        x, w, out_sharding = _aligned(x, w, numbers, weight_first, out_sharding)
    else:
        out_sharding = None
    if weight_first:
        x, w, numbers = w, x, [tuple(reversed(pair)) for pair in numbers]
    return lax.dot_general(
        x,
        w,
        numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )


def _aligned(
    x: Any, w: Any, numbers: Any, weight_first: bool, requested: PartitionSpec | None
) -> tuple:
    """Return resharded operands and the sharding of the result, or None if neither
    operand is split."""
    (over_x, over_w), (batch_x, batch_w) = numbers
    x_names, w_names = ([*map(names_of, spec_of(a))] for a in (x, w))
    if not any((*x_names, *w_names)):
        return x, w, requested
    free_x = [i for i in range(x.ndim) if i not in {*over_x, *batch_x}]
    free_w = [i for i in range(w.ndim) if i not in {*over_w, *batch_w}]
    if requested is not None:
        requested_names = [*map(names_of, requested), *[()] * x.ndim][len(batch_x) :]
        weight_names = {name for names in w_names for name in names}
        remaining = names_in_product(
            [x_names[i] for i in free_x], requested_names, weight_names
        )
        for i, names in zip(free_x, remaining, strict=True):
            x_names[i] = names
    taken = {name for i in (*free_x, *batch_x) for name in x_names[i]}
    taken |= mapped_mesh_axes()
    w_names = [tuple(name for name in names if name not in taken) for names in w_names]
    for i, j in zip(batch_x, batch_w, strict=True):
        w_names[j] = x_names[i]
    for i, j in zip(over_x, over_w, strict=True):
        x_names[i] = w_names[j]
    free_x_names, free_w_names = (
        [x_names[i] for i in free_x],
        [w_names[i] for i in free_w],
    )
    first, second = free_x_names, free_w_names
    if weight_first:
        first, second = second, first
    out = [*(x_names[i] for i in batch_x), *first, *second]
    x, w = (
        jax.sharding.reshard(a, _spec(names))
        for a, names in ((x, x_names), (w, w_names))
    )
    return x, w, _spec(out) if requested is None else requested


def _spec(axes: list[Names]) -> PartitionSpec:
    return PartitionSpec(*(names or None for names in axes))
