"""Requested shardings of the result of a product, on a mesh with explicit axes."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, PartitionSpec

from .._jax import parts_of
from ._merge import Parts
from ._plan import Names, names_of, Plan


def names_in_product(
    names: Sequence[Names], requested: Sequence[Names], weight_names: set[str]
) -> list[Names]:
    """Return the mesh axes that split the tokens of an activation in a product.

    If a mesh axis splits both the tokens and the weight, one of the two is gathered:
    the weight if the result is requested to be split by tokens, otherwise the
    activation.
    """
    return [
        tuple(name for name in now if name in wanted or name not in weight_names)
        for now, wanted in zip(names, requested, strict=False)
    ]


def request(
    mesh: AbstractMesh, spec: PartitionSpec, g: Any, lead: Parts, weight: Parts
) -> tuple[Plan, Parts, Parts]:
    """Return the plan of a product whose result is requested to be split by `spec`.

    A mesh axis of the sum that `spec` names scatters the sum, if the parts are equal.
    Only the first free axis of the weight in storage can be split.

    **Arguments:**

    - `g`: the `Geometry` of the contraction.
    - `lead`: the parts of the stack and the tokens.
    - `weight`: the parts of the permuted axes of the codes.

    **Returns:**

    The plan, and `lead` and `weight` as they split the result.
    """
    num_stack = len(g.stack)
    ndim = len(lead.names) + len(g.free)
    wanted = [*map(names_of, spec), *[()] * (ndim - len(spec))]
    weight_names = {name for entry in weight.names for name in entry}
    summed = {name for entry in weight.names[g.contracted_axes] for name in entry}
    tokens = lead.names[num_stack:]
    batch = sum(names_in_product(tokens, wanted[num_stack:], weight_names), ())
    remaining = summed - {*batch}

    def scatter(parts: Parts, axis: int, size: int, requested: Names):
        """Scatter one axis, if possible, over the requested mesh axes of the sum."""
        nonlocal remaining
        found = tuple(name for name in requested if name in remaining)
        if size % parts_of(mesh, (*parts.names[axis], *found)):
            found = ()
        remaining -= {*found}
        return found, parts.split_further(axis, found, mesh)

    rows: Names = ()
    for axis, size in enumerate(g.tokens, num_stack):
        found, lead = scatter(lead, axis, size, wanted[axis])
        rows += found
    columns: Names = ()
    if g.first_free is not None:
        start = range(len(weight.names))[g.free_axes][0]
        columns, weight = scatter(weight, start, g.free[0], wanted[g.first_free])
    return Plan(mesh, (), batch, (rows, columns)), lead, weight
