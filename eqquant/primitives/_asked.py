"""What is asked of a product on a mesh with explicit axes: how its result is split."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from .._jax import parts_of
from ._plan import Names, Plan


def split_as(x: Any, spec: PartitionSpec | None) -> Any:
    """`x`, split so if that is asked for."""
    return x if spec is None else jax.sharding.reshard(x, spec)


def left_by_product(
    names: Sequence[Names], asked: Sequence[Names], of_weight: set[str]
) -> list[Names]:
    """The mesh axes that split the free axes of an activation while it is multiplied.
    One that splits the weight, too, is kept if it is asked for: the weight is gathered.
    Otherwise the activation is."""
    return [
        tuple(name for name in of if name in to or name not in of_weight)
        for of, to in zip(names, asked, strict=False)
    ]


def plan_asked(
    mesh: AbstractMesh,
    asked: Sequence[Names],
    names: Sequence[Names],
    sizes: Sequence[int],
    of_weight: set[str],
    of_sum: set[str],
) -> tuple[Plan, list[Names]]:
    """A plan that asks for a result whose axes are split so: the free axes of the
    activation, which `names` split now, and the first of those of the weight.

    A mesh axis of the sum that is asked for scatters it, where that leaves equal parts.
    Returns these for each axis, too.
    """
    *of_x, _ = names
    kept = left_by_product(of_x, asked[:-1], of_weight)
    batch = sum(kept, ())
    left = of_sum - {*batch}
    scatter: list[Names] = []
    for size, of, to in zip(sizes, names, asked, strict=True):
        found = tuple(name for name in to if name in left)
        if size % (parts_of(mesh, of) * parts_of(mesh, found)):
            found = ()
        left -= {*found}
        scatter.append(found)
    plan = Plan(mesh, (), batch, (sum(scatter[:-1], ()), scatter[-1]))
    return plan, scatter
