"""How a mesh with explicit axes splits the operands of products."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..._jax import by_compiler, explicit_mesh_of, parts_of, spec_of
from ...partition import names_of


def mesh_of(*args: Any) -> Any:
    """Return the mesh with explicit axes that splits some of the arguments."""
    return next(filter(None, map(explicit_mesh_of, jax.tree.leaves(args))), None)


def split(fn: Callable, specs: Any, *args: Any) -> Any:
    """Return `fn(*args)`. On a mesh with explicit axes, the compiler splits the values
    inside of `fn`, and the results have these specs."""
    mesh = mesh_of(*args)
    return fn(*args) if mesh is None else by_compiler(fn, mesh, specs)(*args)


def spec_of_product(lead: Sequence[Any], rows: Any) -> PartitionSpec:
    """Return the spec of a product: the entries `lead` of the activation, and the entry
    of the rows of the weight."""
    used = {name for entry in lead for name in names_of(entry)}
    return PartitionSpec(*lead, None if used & {*names_of(rows)} else rows)


def type_of_product(x: Any, w: Any, shape: Sequence[int], dtype, spec) -> Any:
    """Return the type of a product, of the types of its operands."""
    kwargs: dict[str, Any] = {"shape": tuple(shape), "dtype": jnp.dtype(dtype)}
    if (mesh_of(x, w)) is not None:
        typed = x if explicit_mesh_of(x) else w
        kwargs["sharding"] = typed.sharding.update(spec=spec)
    return x.update(weak_type=False, **kwargs)


def specs_like(x: Any, stack: int, coded: Any) -> Any:
    """Return the specs of codes and scales of `x`, whose tokens are merged. The first
    axis of the tokens stays split."""
    mesh, entries = mesh_of(x), spec_of(x)
    if mesh is None:
        return None
    tokens = (*entries[stack:-1], None)[0]
    entries = *entries[:stack], tokens, entries[-1]

    def spec(leaf):
        even = lambda n, entry: n > 1 and n % parts_of(mesh, entry) == 0
        pairs = zip(leaf.shape, entries, strict=True)
        return PartitionSpec(*(e if even(n, e) else None for n, e in pairs))

    return jax.tree.map(spec, coded)
