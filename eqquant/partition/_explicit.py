"""Operations on arrays that a mesh with explicit axes splits.

On such a mesh, JAX computes the sharding of each result from the types of the operands.
It rejects some operations, and these functions give it the sharding. On other meshes
they change nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped

from .._jax import by_compiler, explicit_mesh_of, parts_of, spec_of
from ._plan import names_of


# The requested sharding of the result of a product.
Request: TypeAlias = PartitionSpec | None


def has_explicit_split(x: Any) -> bool:
    """Return whether the type of `x` contains how a mesh splits it."""
    return explicit_mesh_of(x) is not None


def spec_like(
    x: Any, shape: Sequence[int], axes: Sequence[int | None] | None = None
) -> Request:
    """Return the spec of an array that is split like `x`.

    `axes` has the axis of `x` for each axis of the array, or None if it is not split.
    The default is the first axes of `x`. An axis without equal parts is not split.
    """
    mesh = explicit_mesh_of(x)
    if mesh is None:
        return None
    axes = range(len(shape)) if axes is None else axes
    names = (None if axis is None else spec_of(x)[axis] for axis in axes)
    entries = zip(shape, names, strict=True)
    even = lambda size, entry: size % parts_of(mesh, entry) == 0
    return PartitionSpec(*(n if even(size, n) else None for size, n in entries))


def split_by_compiler(fn: Callable, x: Any, specs: Any) -> Callable:
    """Let the compiler choose the shardings inside of `fn`, on the mesh of `x`. `specs`
    are the specs of the results."""
    mesh = explicit_mesh_of(x)
    return fn if mesh is None else by_compiler(fn, mesh, specs)


def reshard_to(x: Any, spec: Request, axes: Sequence[int | None] | None = None) -> Any:
    """Reshard `x` if a sharding is requested.

    `axes` has the entry of `spec` for each axis of `x`, or None if the axis keeps its
    split. The default is all entries in order.
    """
    if spec is None:
        return x
    if axes is not None:
        entries = [*spec, *[None] * len(axes)]
        own = zip(axes, spec_of(x), strict=True)
        spec = PartitionSpec(*(now if i is None else entries[i] for i, now in own))
    return jax.sharding.reshard(x, spec)


def request_in_order(sharding: Any, order: Sequence[int]) -> Request:
    """Return the requested sharding of a result whose axes are permuted by `order`."""
    if sharding is None:
        return None
    entries = [*sharding.spec, *[None] * (len(order) - len(sharding.spec))]
    return PartitionSpec(*(entries[i] for i in order))


def look_up(a: Shaped[Array, "..."], rows: Any) -> Shaped[Array, "..."]:
    """Return `a[rows]`, even if a mesh splits the rows of the table or the indices.

    The result is split like the indices and like the other axes of the table.
    """
    used = {name for entry in spec_of(rows) for name in names_of(entry)}
    left = [None if used & {*names_of(entry)} else entry for entry in spec_of(a)[1:]]
    return a.at[rows].get(out_sharding=PartitionSpec(*spec_of(rows), *left))
