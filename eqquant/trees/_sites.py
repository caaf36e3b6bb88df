"""The leaves of a pytree, with their paths and owners."""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import jax.tree_util as jtu

from ..arrays import is_implicit
from ._conventions import is_holder, is_reparameterised


Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Site:
    """A leaf of a pytree, the layer that holds it, and the name of the field.

    A wrapper such as a `NamedArray` may be in between. It does not count as the layer.
    """

    path: str
    leaf: Any
    owner: Any
    field: str
    # Whether the leaf is inside of a layer that computes its weight in each call.
    reparameterised: bool


def sites(tree: Any) -> Iterator[Site]:
    """Yield every leaf in the order of `jax.tree.leaves`. Implicit arrays are
    leaves."""
    return _sites(tree, "", None, "", False)


def _sites(node, path, owner, field, reparameterised) -> Iterator[Site]:
    children = [] if is_implicit(node) else _children(node)
    if children is None or is_implicit(node):
        yield Site(path, node, owner, field, reparameterised)
        return
    inside = reparameterised or is_reparameterised(node)
    for key, child in children:
        name = _name(node, key, child)
        below = f"{path}.{name}" if path else name
        stands_for_it = owner is not None and is_holder(node, name)
        layer = (owner, field) if stands_for_it else (node, name)
        yield from _sites(child, below, *layer, inside)


def _children(node) -> list[tuple[Any, Any]] | None:
    """Return the children of a node, or None for a leaf."""
    children, treedef = jtu.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node
    )
    if jtu.treedef_is_leaf(treedef) and children and children[0][1] is node:
        return None
    return [(keys[0], child) for keys, child in children]


def _name(node, key, child) -> str:
    if isinstance(key, jtu.FlattenedIndexKey):  # A class without names of its children.
        for name, value in getattr(node, "__dict__", {}).items():
            if value is child:
                return name
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
