"""Dense products, also on meshes with explicit axes."""

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from .._jax import has_explicit_axes, mapped_mesh_axes, spec_of
from ._plan import Names, names_of
from ._request import names_in_product
from ._rule import derive, Role, Rule


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
    x_names, w_names = ([*map(names_of, spec_of(a))] for a in (x, w))
    if not any((*x_names, *w_names)):
        return x, w, requested
    rule = _rule(x.ndim, w.ndim, numbers, weight_first)
    names: dict[Role, Names] = dict(zip(rule.operands[1], w_names, strict=True))
    by_x: dict[Role, Names] = dict(zip(rule.operands[0], x_names, strict=True))
    names |= {role: by_x[role] for role in rule.leading}
    if requested is not None:
        batch, _ = numbers[1]
        free = [role for role in rule.leading if role not in batch]
        wanted = [*map(names_of, requested), *[()] * x.ndim][len(batch) :]
        weight_names = {name for names in w_names for name in names}
        now = [names[role] for role in free]
        names |= zip(free, names_in_product(now, wanted, weight_names), strict=True)
    rule = dataclasses.replace(rule, leading=(*rule.leading, "mapped"))
    names["mapped"] = tuple(mapped_mesh_axes())
    mesh = jax.sharding.get_abstract_mesh()
    partition = derive(rule, mesh, names, (1,) * len(rule.out), {})
    x, w = map(jax.sharding.reshard, (x, w), partition.whole_specs)
    return x, w, partition.out_spec if requested is None else requested


def _rule(x_ndim: int, w_ndim: int, numbers: Any, weight_first: bool) -> Rule:
    """Return the rule of a dense product. The roles are the axes of `x`, and then those
    of `w` that remain in the result."""
    (over_x, over_w), (batch_x, batch_w) = numbers
    shared = dict(zip((*over_w, *batch_w), (*over_x, *batch_x), strict=True))
    x_roles = tuple(range(x_ndim))
    w_roles = tuple(shared.get(axis, x_ndim + axis) for axis in range(w_ndim))
    tokens = tuple(i for i in x_roles if i not in {*over_x, *batch_x})
    free = tuple(role for role in w_roles if role >= x_ndim)
    out = (*batch_x, *(free + tokens if weight_first else tokens + free))
    return Rule((x_roles, w_roles), out, (*batch_x, *tokens))
